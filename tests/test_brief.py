"""What `make quick` says of failures: a line for each kind, with the command for the plainest test."""

import os
import subprocess
import sys

from tests.brief import short
from tests.helpers import ROOT

FAILING = """
import pytest


@pytest.mark.parametrize("flags", [{"block": "simplified", "window": 3}, {"block": "parallel"}, {}], ids=str)
@pytest.mark.parametrize("n", [0, 1])
def test_sizes(flags, n):
    assert len(flags) < n


def test_words():
    raise ValueError("n_head=5 does not divide n_embd=16\\nsecond line")
"""


def test_failures_are_told_by_kind(tmp_path):
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_failing.py").write_text(FAILING)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.brief", "-p", "no:cacheprovider"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    said = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True).stdout
    assert [line for line in said.splitlines() if ".py" in line] == [
        "test_failing.py:12: ValueError: n_head=5 does not divide n_embd=16",
        '    python -m pytest "test_failing.py::test_words"',
        "test_failing.py:8: assert len(flags) < n (and 4 more)",
        '    python -m pytest "test_failing.py::test_sizes[0-]"',
    ]


def test_ids_have_the_characters_of_words():
    assert short("qkv_bias=True,block=c,p;c+c/2,s") == "qkv_bias:True+block:c+p+c+c/2+s"
