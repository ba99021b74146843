"""The list of faults that `make mutants` plants fits the code. Planting takes minutes and is not done here."""

import pytest

from tests.faults import FAULTS
from tests.helpers import ROOT


@pytest.mark.parametrize("number", range(len(FAULTS)))
def test_a_fault_can_be_planted(number):
    """Whoever moves the code anchors its faults anew."""
    fault = FAULTS[number]
    text = (ROOT / fault.file).read_text(encoding="utf-8")
    planted = fault.planted(text)
    compile(planted, fault.file, "exec")
    assert planted != text and fault.what.endswith(".")
    for test in fault.tests.split():
        path, _, name = test.partition("[")[0].partition("::")
        assert not name or f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), test
