"""Every command of README.md, docs/ and the Makefile can be typed: its program is there and takes its flags.

Nothing is trained or read but config files. A flag whose value is a variable of the shell, as in --layer=$s, counts as
given with its default.
"""

import ast
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from functools import partial
from itertools import dropwhile
from pathlib import Path

import pytest
from helpers import ROOT

from configurator import Config, parse, parse_positional, read_flags
from data.command import Parser
from data.errors import require
from engine.interchange.__main__ import ExportConfig
from evaluate import EvaluateConfig
from sample import SampleConfig
from tools import bench
from tools.child import words_of
from tools.compare.trainings import CompareConfig
from tools.curves import PlotConfig
from tools.lens import LensConfig

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "Makefile"]
INLINE = re.compile(r"`((?:python|torchrun|sbatch|make) [^`]*)`")
FENCED = re.compile(r"^```.*?\n(.*?)^```", re.MULTILINE | re.DOTALL)
OF_SHELL = re.compile(r"[;&|<>()]+|do")  # it ends a command


def code_of(page: Path) -> Iterator[str]:
    """Each line of code in a page, with the lines that a backslash or a quotation mark adds to it."""
    text = page.read_text(encoding="utf-8")
    blocks = FENCED.findall(text)
    if page.name == "Makefile":
        blocks = [text.replace("$(BIN)/", "")]
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
    """The words without those that hold a variable of the shell, whose flags must exist."""
    for word in words:
        name = word.removeprefix("--").partition("=")[0]
        if "$" in word and "$" not in name and name not in cls.__dataclass_fields__:
            raise ValueError(f"{word}: no such flag")
    return [word for word in words if "$" not in word and word != "..."]


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
    _, runs = bench.read([word for word in known(bench.BenchConfig, words) if not word.startswith("--against=")])
    for _, run in runs:
        check_train(run)


def check_flags(cls: type, words: list[str]):
    parse(cls, known(cls, words))


def check_export(words: list[str]):
    (first, _, _), _ = parse_positional(ExportConfig, words)
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
    else:
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


def problems(page: Path) -> tuple[list[str], list[str]]:
    """(programs that its commands start, an error for each command that cannot be typed)."""
    programs, errors = [], []
    for code in code_of(page):
        try:
            programs += map(check, commands_of(code))
        except (ValueError, OSError, SyntaxError) as error:
            errors.append(f"{page.name}: {code}: {error}")
    return [program for program in programs if program], errors


@pytest.fixture(autouse=True)
def here(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", sys.path[:])  # each prepare.py adds to it


def test_every_command_of_the_pages_can_be_typed():
    found, errors = [], []
    for page in PAGES:
        programs, wrong = problems(page)
        found += programs
        errors += wrong
    assert not errors, "\n".join(errors)
    assert CHECK.keys() | {"make", "pytest", "-c", "data/text/prepare.py"} <= set(found) and len(found) > 100


@pytest.mark.parametrize("code, said", [
    ("python train.py \\\n    --n_layr=3", "n_layr=3"),
    ("torchrun --standalone train.py config/train_pycode.py --rope_scaling=linear:2 --pos=none", "rope_scaling"),
    ("torchrun --nproc_per_node=2 trian.py", "trian.py"),
    ("for s in c p; do python train.py --layr=$s; done", "--layr=$s"),
    ("OMP_NUM_THREADS=1 python sample.py --out_dir=out/x --temprature=0", "temprature"),
    ("runs+=('--run=config/train_pycode.py --block=y')", "block=y"),
    ("python -m tools.bench --run=--n_layr=3", "n_layr=3"),
    ("python data/text/prepare.py --tokeniser=gpt2", "--tokeniser"),
    ("python -m tool.plot out/x", "tool.plot"),
    ("make trian", "trian"),
    ("python sample.py --start='To be", "quotation mark"),
])  # fmt: skip
def test_a_command_that_cannot_be_typed_is_named(code, said, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"# A page\n\n```\npython train.py --n_layer=3\n{code}\n```\n\nType `make test`.\n")
    programs, (error,) = problems(page)
    assert programs == ["train.py", "make"] and said in error
