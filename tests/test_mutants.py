"""The list of faults that `make mutants` plants fits the code. Planting takes minutes and is not done here."""

import pytest

from tests.faults import FAULTS
from tests.helpers import ROOT


@pytest.mark.parametrize("number", range(len(FAULTS)))
def test_a_fault_can_be_planted(number):
    """Whoever moves the code anchors its faults anew."""
    file, old, new, what, tests = FAULTS[number]
    text = (ROOT / file).read_text(encoding="utf-8")
    assert text.count(old) == 1, f"{file} holds {text.count(old)} times what fault {number} replaces:\n{old}"
    compile(text.replace(old, new), file, "exec")
    assert old != new and what.endswith(".")
    for test in tests.split():
        path, _, name = test.partition("[")[0].partition("::")
        assert not name or f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), test
