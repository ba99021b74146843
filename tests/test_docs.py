"""What README.md and docs/ name exists: tests, files and flags."""

import re
from dataclasses import fields

import pytest
from conftest import ROOT

from configurator import Config
from sample import SampleConfig

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tests_exist(page):
    named = re.findall(r"\b(test_\w+)\b(?:\.py)?(?:::(\w+))?", page.read_text(encoding="utf-8"))
    assert named or page.name == "scaling.md"
    for file, test in named:
        text = (ROOT / "tests" / f"{file}.py").read_text(encoding="utf-8")
        assert not test or f"\ndef {test}(" in text, f"{file}::{test}"


@pytest.mark.parametrize("page", ["README.md", "docs/scaling.md"])
def test_flags_of_commands_exist(page):
    """Of train.py and sample.py, in code that can be copied."""
    page = ROOT / page
    commands = re.findall(r"(train|sample)\.py((?: +[^\s#`\\]+)*)", page.read_text(encoding="utf-8"))
    assert commands
    known = {"train": {f.name for f in fields(Config)}, "sample": {f.name for f in fields(SampleConfig)}}
    for script, words in commands:
        for word in words.split():
            if word.startswith("--") and word != "--help":
                assert word[2:].partition("=")[0] in known[script], word
            elif word.startswith("config/") and "x.py" not in word:
                assert (ROOT / word).is_file(), word


def test_files_of_the_map_exist():
    """The README's table of what is where names every module, and none that is not there."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    table = text.partition("## What is where")[2].split("```")[1]
    beneath = {"costs", "dcp_reader", "dcp_writer", "checkpoint_commands", "checkpoint_state"}
    named = set(re.findall(r"\b(\w+)\.py\b", table)) | beneath
    modules = [path for folder in (".", "engine", "data") for path in (ROOT / folder).glob("*.py")]
    assert named == {path.stem for path in modules} - {"__init__"}
    for word in beneath:
        assert word in table
