"""What README.md and docs/ name exists: tests, files, flags and links."""

import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest
from conftest import ROOT

from configurator import Config, parse
from evaluate import EvaluateConfig
from lens import LensConfig
from sample import SampleConfig

README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]*)\)")
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@each_page
def test_tests_exist(page):
    named = re.findall(r"\b(test_\w+)\b(?:\.py)?(?:::(\w+))?", page.read_text(encoding="utf-8"))
    assert named
    for file, test in named:
        text = (ROOT / "tests" / f"{file}.py").read_text(encoding="utf-8")
        assert not test or f"\ndef {test}(" in text, f"{file}::{test}"


@each_page
def test_flags_of_commands_exist(page):
    """Of train.py, sample.py, evaluate.py and lens.py, in code that can be copied."""
    commands = re.findall(r"(train|sample|evaluate|lens)\.py((?: +[^\s#`\\]+)*)", page.read_text(encoding="utf-8"))
    assert commands or page.name in ("blocks.md", "tests.md")
    configs = {"train": Config, "sample": SampleConfig, "evaluate": EvaluateConfig, "lens": LensConfig}
    known = {script: {f.name for f in fields(config)} for script, config in configs.items()}
    for script, words in commands:
        for word in words.split():
            if word.startswith("--") and word != "--help":
                assert word[2:].partition("=")[0] in known[script], word
            elif word.startswith("config/") and "x.py" not in word:
                assert (ROOT / word).is_file(), word


def test_the_commands_that_make_train_says_next_can_be_typed():
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    recipe = text.partition("\ntrain: ")[2].partition("\n\n")[0]
    text = recipe.replace("$(BIN)", ".venv/bin").replace("$(RUN)", "out/pycode")
    says = [shlex.split(line)[1] for line in text.splitlines() if line.startswith("\t@echo")]
    assert says[0].startswith("next: ")
    (_, script, *flags), (_, other, *more) = (shlex.split(line.partition(": ")[2]) for line in says)
    assert (script, other) == ("sample.py", "train.py")
    assert parse(SampleConfig, flags).out_dir == "out/pycode"  # where the recipe trains
    assert f"config/train_pycode.py --out_dir={parse(SampleConfig, flags).out_dir} " in text
    assert parse(Config, [str(ROOT / path) for path in more]).out_dir != "out/pycode"


def test_files_of_the_map_exist():
    """The README's table of what is where names every module, and none that is not there."""
    table = README.read_text(encoding="utf-8").partition("## What is where")[2].split("```")[1]
    named = set(re.findall(r"\b(\w+)\.py\b", table))
    modules = [path for folder in (".", "engine", "data") for path in (ROOT / folder).glob("*.py")]
    assert named == {path.stem for path in modules} - {"__init__"}


def test_the_readme_is_short():
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 180


@pytest.mark.parametrize("page", PAGES[1:], ids=lambda page: page.name)
def test_the_first_sentence_says_whom_a_page_serves(page):
    title, empty, first, *_ = page.read_text(encoding="utf-8").splitlines()
    assert title.startswith("# ") and empty == "" and first.startswith("This page is for ")


def headings(page: Path) -> set[str]:
    """The anchors of a page's headings, spelled as GitHub does; lines of code that begin with # are none."""
    lines = re.findall(r"^#+ (.+)$", FENCED.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}


@each_page
def test_links_lead_to_files_and_headings(page):
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert ROOT.resolve() in target.parents and target.exists(), link
        assert not anchor or anchor in headings(target), link


def test_the_readme_links_to_every_page():
    links = {link.partition("#")[0] for link in LINK.findall(README.read_text(encoding="utf-8"))}
    assert {f"docs/{page.name}" for page in PAGES[1:]} <= links
