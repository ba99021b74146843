import importlib
import sys

import pytest

from data import command, corpus


@pytest.fixture
def small(monkeypatch):
    """Makes jobs so small that a few documents need many of them."""
    monkeypatch.setattr(corpus, "JOB_CHARACTERS", 60)
    monkeypatch.setattr(corpus, "JOB_DOCUMENTS", 3)


@pytest.fixture
def call(monkeypatch, capsys, in_this_process):
    """call("text", *flags): the command in this process; returns (exit code, stdout, stderr)."""

    def run(name: str, *flags: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["prepare.py", *map(str, flags)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            command.run(importlib.import_module(f"data.{name}.prepare").main)
        return end.value.code, *capsys.readouterr()

    return run
