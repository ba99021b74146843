"""Every family computes, in float64, what it did when tests/golden.json was written."""

import json

import golden
import pytest
import torch

EXPECTED = json.loads(golden.FILE.read_text())


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    golden.prepare(folder := tmp_path_factory.mktemp("golden") / "data")
    return folder


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_every_family_has_its_figures():
    assert EXPECTED.keys() - {"made with"} == golden.FAMILIES.keys()


@pytest.mark.parametrize("name", golden.FAMILIES)
def test_figures_are_as_they_were(name, data, tmp_path, one_thread, monkeypatch):
    monkeypatch.setattr(golden.train, "peak_flops", None)  # golden's own, gone after the test
    found = golden.figures(data, tmp_path / "out", name)
    assert found.keys() == EXPECTED[name].keys() and len(found["loss"]) == 20 and len(found["val_loss"]) == 3
    for key, numbers in found.items():
        assert numbers == pytest.approx(EXPECTED[name][key], abs=1e-6), key  # the file has 7 digits
