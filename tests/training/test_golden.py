"""Every family computes, in float64, what it did when tests/golden.json was written: here three steps of a half
in which each two of a block, an objective and an optimizer meet, and in make slow twenty of all."""

import itertools
import json
from operator import itemgetter

import pytest

from tests import golden
from tests.families import BLOCKS, OBJECTIVES, OPTIMIZERS

EXPECTED = json.loads(golden.FILE.read_text())
ALL = list(itertools.product(range(len(BLOCKS)), range(len(OBJECTIVES)), range(len(OPTIMIZERS))))  # as in FAMILIES
QUICK = [name for name, place in zip(golden.FAMILIES, ALL, strict=True) if sum(place) % 2 == 0]
SLOW = [pytest.param(name, 20, marks=pytest.mark.slow) for name in golden.FAMILIES]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    golden.prepare(folder := tmp_path_factory.mktemp("golden") / "data")
    return folder


def test_every_family_has_its_figures():
    assert EXPECTED.keys() - {"made with"} == golden.FAMILIES.keys()
    for pair in itertools.combinations(range(3), 2):
        quick, every = ({itemgetter(*pair)(name.split("; ")) for name in names} for names in (QUICK, golden.FAMILIES))
        assert quick == every


@pytest.mark.parametrize("name, steps", [*((name, 3) for name in QUICK), *SLOW])
def test_figures_are_as_they_were(name, steps, data, tmp_path, in_this_process):
    found = golden.figures(data, tmp_path / "out", name, steps)
    assert found.keys() == EXPECTED[name].keys()
    assert len(found["loss"]) == steps
    assert len(found["val_loss"]) == steps // 10 + 1
    for key, numbers in found.items():
        assert numbers == pytest.approx(EXPECTED[name][key][: len(numbers)], abs=1e-6), key  # the file has 7 digits
