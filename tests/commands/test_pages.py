"""What README.md and docs/ name exists: tests, files, flags and links. Every command there, in the Makefile and in what
programs say of themselves can be typed: its program is there and takes its flags.

Nothing is trained or read but config files. A flag whose value is a variable of the shell, as in --block=$s, counts as
given with its default.
"""

import ast
import csv
import itertools
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from copy import copy
from functools import partial
from itertools import dropwhile
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from configurator import parse, parse_positional, read_flags
from data.command import Parser
from data.errors import require
from engine.config import Config
from engine.interchange.__main__ import ExportConfig
from engine.parallel import ranks as parallel
from evaluate import EvaluateConfig
from sample import SampleConfig
from tests.helpers import ROOT
from tests.test_imports import FILES
from tools import bench
from tools.compare.trainings import CompareConfig
from tools.curves import PlotConfig
from tools.lens import LensConfig
from tools.training_process import words_of

README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]*)\)")
INLINE = re.compile(r"`((?:python|torchrun|sbatch|make) [^`]*)`")
FENCED = re.compile(r"^```.*?\n(.*?)^```", re.MULTILINE | re.DOTALL)
OF_SHELL = re.compile(r"[;&|<>()]+|do")  # it ends a command
OTHERS = re.compile(r"[.]{3}|config/[a-z][.]py|.*[$].*", re.DOTALL)  # words for what a user has


def code_of(page: Path) -> Iterator[str]:
    """Each line of code in a page, with the lines that a backslash or a quotation mark adds to it."""
    text = page.read_text(encoding="utf-8")
    blocks = FENCED.findall(text)
    if page.name == "Makefile":
        blocks = [text.replace("$(BIN)/", "")]
    elif page.suffix == ".py":
        docstring = ast.get_docstring(ast.parse(text)) or ""
        printed = re.findall(r'"\s*(python -m [^"{]+)', text)
        blocks = [docstring.replace("\n    ", "\n"), *printed]
    for block in blocks:
        waiting = ""
        for line in block.splitlines():
            waiting += line.removeprefix("$ ")
            if waiting.endswith("\\"):
                waiting = waiting[:-1]
            elif waiting.startswith("python -c") and waiting.count('"') % 2:
                waiting += "\n"
            else:
                yield waiting
                waiting = ""
    for code in INLINE.findall(FENCED.sub("", text)):
        yield code.replace("\n", " ")


def commands_of(code: str) -> Iterator[list[str]]:
    """The commands of a line for a shell, each as its words; nothing of a line that is none, such as output."""
    lexer = shlex.shlex(code, posix=True, punctuation_chars=";&|<>()")
    lexer.whitespace_split = True
    try:
        words = list(lexer)
    except ValueError:
        require(not code.startswith(("python", "torchrun")), "a quotation mark is missing")
        return  # an apostrophe in the output of a program
    command = []
    for word in [*words, ";"]:
        if OF_SHELL.fullmatch(word):
            if command:
                yield command
            command = []
        else:
            command.append(word)


def known(cls: type, words: list[str]) -> list[str]:
    """The words that are not for what a user has; the flag of a variable of the shell must exist."""
    for word in words:
        name = word.removeprefix("--").partition("=")[0]
        if "$" in word and "$" not in name and name not in cls.__dataclass_fields__:
            raise ValueError(f"{word}: no such flag")
    return [word for word in words if not OTHERS.fullmatch(word)]


def check_train(words: list[str]):
    words = known(Config, words)
    given = read_flags(Config, words)
    if "init_from" not in given or given["init_from"].value == "scratch":  # otherwise the other flags are stored
        parse(Config, words)


def check_compare(words: list[str]):
    options = parse(CompareConfig, known(CompareConfig, words))
    for word in words:
        if word.startswith("--run="):
            settings = [f"--{setting}" for setting in options.settings if setting]
            check_train(words_of("common", options.common) + words_of("run", word[6:]) + settings[:1])


def check_bench(words: list[str]):
    for _, run in bench.read(known(bench.BenchConfig, words))[1]:
        check_train(run)


def check_flags(cls: type, words: list[str]):
    parse(cls, known(cls, words))


def check_export(words: list[str]):
    (first, _, _), _ = parse_positional(ExportConfig, [word.strip("[]") for word in words])
    require(first == "export", f"{first} is no command of engine.interchange")


def check_prepare(program: str, words: list[str]):
    """Runs the program up to its parser."""
    parse_args = Parser.parse_args

    def parse_only(parser: Parser):
        parse_args(parser, words)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Parser, "parse_args", parse_only)
        runpy.run_path(str(ROOT / program), run_name="prepare")["main"]()


CHECK = {
    "train.py": check_train,
    "config/slurm/train.sbatch": check_train,
    "sample.py": partial(check_flags, SampleConfig),
    "evaluate.py": partial(check_flags, EvaluateConfig),
    "tools.lens": partial(check_flags, LensConfig),
    "tools.plot": partial(parse_positional, PlotConfig),
    "tools.compare": check_compare,
    "tools.bench": check_bench,
    "engine.interchange": check_export,
}


def check_program(program: str, *words: str) -> str:
    """The program, whose arguments are right."""
    words = [word for word in words if word != "--help"]
    if program == "-c":
        ast.parse(words[0])
    elif program == "make":
        targets = re.findall(r"^([\w./-]+(?: [\w./-]+)*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        absent = [word for word in words if "=" not in word and word not in " ".join(targets).split()]
        require(not absent, f"make {absent}: the Makefile has no such target")
    elif program == "pytest":
        for word in words:
            there = not word.startswith("tests/") or (ROOT / word.partition("::")[0]).exists()
            require(there, f"{word} is no test")
    elif program.endswith("prepare.py"):
        check_prepare(program, words)
    elif program in CHECK:
        CHECK[program](words)
    elif not program.startswith("tests."):  # which have no flags
        require((ROOT / program).is_file(), f"{program} is no program of this project")
    return program


def check(command: list[str]) -> str | None:
    """The program that a command starts, or None if it is none of ours. An error if the command cannot be typed."""
    command = list(dropwhile(re.compile(r"\w+=").match, command))  # without variables of the environment
    if not command:
        return None
    starter, *words = command
    if starter.startswith("--run="):  # of an array of the shell
        return check_program("tools.compare", *command)
    if starter == "make":
        return check_program(*command)
    if starter.rpartition("/")[2] == "python":
        words = list(dropwhile(lambda word: word == "-m", words))
    elif starter in ("torchrun", "sbatch"):
        words = list(dropwhile(lambda word: word.startswith("-"), words))
    else:
        return None
    if words in ([], ["$"]) or words[0] == "pip":  # the program alone is named; the Makefile's $<
        return None
    return check_program(*words)


@pytest.fixture(autouse=True)
def here(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", sys.path[:])  # each prepare.py adds to it


def test_every_command_can_be_typed():
    found = []
    errors = []
    for page in [*PAGES, ROOT / "Makefile", *FILES]:
        for code in code_of(page):
            try:
                found += filter(None, map(check, commands_of(code)))
            except (ValueError, OSError, SyntaxError) as error:
                errors.append(f"{page.name}: {code}: {error}")
    assert not errors, "\n".join(errors)
    assert CHECK.keys() | {"make", "pytest", "-c", "data/text/prepare.py"} <= set(found)
    assert len(found) > 100


# ---- What the pages name


def test_tests_exist():
    named = set()
    for page in PAGES:
        named |= set(re.findall(r"\b(test_\w+)\b(?:\.py)?(?:::(\w+))?", page.read_text(encoding="utf-8")))
    assert len(named) > 30
    for file, test in named:
        (path,) = (ROOT / "tests").rglob(f"{file}.py")
        text = path.read_text(encoding="utf-8")
        assert not test or f"\ndef {test}(" in text, f"{file}::{test}"


def test_files_of_the_map_exist():
    """The README's table of what is where names every program, module at the top and package, and none that is not."""
    table = README.read_text(encoding="utf-8").partition("## What is where")[2].split("```")[1]
    named = set(re.findall(r"\b(\w+)\.py\b", table))
    assert named == {path.stem for path in ROOT.glob("*.py")}
    packages = {str(path.parent.relative_to(ROOT)) for path in ROOT.glob("[a-z]*/**/__init__.py")}
    packages = {package for package in packages if not package.startswith("tests")}
    assert packages <= set(re.findall(r"([\w/]+)/ ", table))


def headings(page: Path) -> set[str]:
    """The anchors of a page's headings, spelled as GitHub does; lines of code that begin with # are none."""
    lines = re.findall(r"^#+ (.+)$", FENCED.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_headings_exist(page):
    """Those that links lead to, and files in a folder of the project that the text or a command names."""
    text = page.read_text(encoding="utf-8")
    for file in re.findall(r"(?<![\w/.])((?:config|data|docs|engine|tests|tools)/[\w/]+[.](?:py|sbatch|json))\b", text):
        assert (ROOT / file).is_file(), file
    links = LINK.findall(text)
    assert page != README or {f"docs/{each.name}" for each in PAGES[1:]} <= {link.partition("#")[0] for link in links}
    for link in links:
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert ROOT.resolve() in target.parents and target.exists(), link
        assert not anchor or anchor in headings(target), link


def test_rows_of_what_was_tried_are_whole():
    """Each row of docs/tried.csv names an experiment and has a figure, and a comma in a cell does not divide it."""
    header, *rows = csv.reader((ROOT / "docs" / "tried.csv").open(encoding="utf-8"))
    for row in rows:
        assert len(row) == len(header), row
        cells = dict(zip(header, row, strict=True))
        assert cells["experiment"] and (cells["result"] or cells["difference"]), row
        assert not cells["half-width"] or cells["difference"], row


def test_the_flags_that_do_not_combine_are_those_of_the_table():
    """Pairs of two flags of a layout, or of one and one of the model: docs/scaling.md has a table of those refused."""
    page = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8").partition("| does not combine with |")[2]
    rows = [re.findall(r"`(--\w+=[\w.]+)`", line) for line in page.partition("\n\n")[0].splitlines()[2:]]
    listed = {frozenset((flag, other)) for flag, *others in rows for other in others}
    of_fsdp = ["--fsdp_reshard=False", "--dp_replicate=2"]
    layout = ["--parallel=fsdp", *of_fsdp, "--tp=2", "--cp=2", "--pp=2", "--ep=2"]
    layout += ["--activation_checkpoint=selective", "--activation_checkpoint=full"]
    model = [f"--{name}={value}" for name in ("block", "objective", "optimizer", "attention", "pos", "norm", "mlp")
             for value in get_args(get_type_hints(Config)[name])]  # fmt: skip
    model += ["--dropout=0.1", "--doc_mask=True", "--bias=True", "--qk_norm=True", "--window=64"]
    model += ["--n_expert=4"]
    experts = ["--block=c+p+e", "--n_expert=4"]
    needs = dict.fromkeys(of_fsdp, ["--parallel=fsdp"])
    needs |= {"--block=superblock": experts, "--ep=2": experts[1:]}
    needs |= {"--attention=gqa": ["--n_kv_head=6"], "--objective=seq2seq": ["--span_length=4"]}
    defaults = parse(Config, ["--gradient_accumulation_steps=8", "--vocab_size=256", "--n_layer=2"])
    refused = set()
    for pair in itertools.chain(itertools.combinations(layout, 2), itertools.product(layout, model)):
        given = [*pair, *(flag for one in pair for flag in needs.get(one, []))]
        flags = read_flags(Config, given)
        if len(flags) < len({*given}) or pair == ("--tp=2", "--attention=mqa"):  # mqa has one head of keys
            continue
        cfg = copy(defaults)
        vars(cfg).update({name: flag.value for name, flag in flags.items()})
        try:
            parallel.check_layout(cfg, 4)
        except ValueError as error:
            refused.add(frozenset(pair))
            assert all(flag[2:].partition("=")[0] in str(error) for flag in pair), error
    assert refused == listed
