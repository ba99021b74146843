"""Every family computes, in float64, what it did when tests/golden.json was written.

Each two of a block, an objective and an optimizer meet in the half that make test runs; make slow runs the others.
"""

import itertools
import json

import golden
import pytest
from families import BLOCKS, OBJECTIVES, OPTIMIZERS

EXPECTED = json.loads(golden.FILE.read_text())
ALL = list(itertools.product(range(len(BLOCKS)), range(len(OBJECTIVES)), range(len(OPTIMIZERS))))  # as in FAMILIES
NAMES = [
    pytest.param(name, marks=[pytest.mark.slow] * (sum(place) % 2))
    for name, place in zip(golden.FAMILIES, ALL, strict=True)
]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    golden.prepare(folder := tmp_path_factory.mktemp("golden") / "data")
    return folder


def test_every_family_has_its_figures():
    assert EXPECTED.keys() - {"made with"} == golden.FAMILIES.keys()
    quick = [param.values[0].split("; ") for param in NAMES if not param.marks]
    for i, j in itertools.combinations(range(3), 2):
        every = {(name.split("; ")[i], name.split("; ")[j]) for name in golden.FAMILIES}
        assert {(parts[i], parts[j]) for parts in quick} == every


@pytest.mark.parametrize("name", NAMES)
def test_figures_are_as_they_were(name, data, tmp_path, in_this_process):
    found = golden.figures(data, tmp_path / "out", name)
    assert found.keys() == EXPECTED[name].keys() and len(found["loss"]) == 20 and len(found["val_loss"]) == 3
    for key, numbers in found.items():
        assert numbers == pytest.approx(EXPECTED[name][key], abs=1e-6), key  # the file has 7 digits
