"""What README.md and docs/ name exists: tests, files, flags and links."""

import itertools
import re
from copy import copy
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from helpers import ROOT

from configurator import Config, parse, read_flags
from engine.parallel import ranks as parallel

README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]*)\)")
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def test_tests_exist():
    named = set()
    for page in PAGES:
        named |= set(re.findall(r"\b(test_\w+)\b(?:\.py)?(?:::(\w+))?", page.read_text(encoding="utf-8")))
    assert len(named) > 30
    for file, test in named:
        (path,) = (ROOT / "tests").rglob(f"{file}.py")
        text = path.read_text(encoding="utf-8")
        assert not test or f"\ndef {test}(" in text, f"{file}::{test}"


@each_page
def test_files_exist(page):
    """Those in a folder of the project that a page names in its text or in a command."""
    text = page.read_text(encoding="utf-8")
    for file in re.findall(r"(?<![\w/.])((?:config|data|docs|engine|tests|tools)/[\w/]+[.](?:py|sbatch|json))\b", text):
        assert (ROOT / file).is_file(), file


def test_files_of_the_map_exist():
    """The README's table of what is where names every program, module at the top and package, and none that is not."""
    table = README.read_text(encoding="utf-8").partition("## What is where")[2].split("```")[1]
    named = set(re.findall(r"\b(\w+)\.py\b", table))
    assert named == {path.stem for path in ROOT.glob("*.py")}
    packages = {str(path.parent.relative_to(ROOT)) for path in ROOT.glob("[a-z]*/**/__init__.py")}
    assert packages <= set(re.findall(r"([\w/]+)/ ", table))


def test_modules_that_are_started_with_m_are_programs():
    """Whatever the pages, the Makefile and the code say can be typed after `python -m`."""
    files = [*PAGES, ROOT / "Makefile", *ROOT.glob("*.py"), *ROOT.glob("[a-z]*/**/*.py")]
    started = re.compile(r"-m[\s\\\"',]+((?:data|engine|tools)[.]\w+(?:[.]\w+)*)")
    named = {name for file in files for name in started.findall(file.read_text(encoding="utf-8"))}
    assert len(named) > 4
    for name in named:
        path = ROOT / name.replace(".", "/")
        program = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
        assert program.exists() and '__name__ == "__main__"' in program.read_text(encoding="utf-8"), name


def table_of_losses(page: str) -> list[tuple[str, list[float]]]:
    """(parameters, [loss, difference and its interval if there is one]) of each row."""
    rows = re.findall(r"^.*\| ([\d,]{7,}) +\| (\d\.\d+)(.*)$", page, re.MULTILINE)
    effects = [re.findall(r"\+(\S+) ± (\S+)", rest) for *_, rest in rows]
    return [(size, [float(loss), *map(float, sum(effect, ()))])
            for (size, loss, _), effect in zip(rows, effects, strict=True)]  # fmt: skip


def test_the_readmes_figures_are_those_of_the_pages_and_files():
    pages = README, ROOT / "docs" / "baselines.md", ROOT / "docs" / "nanogpt.md"
    readme, baselines, nanogpt = (path.read_text(encoding="utf-8") for path in pages)
    shown, measured = table_of_losses(readme), table_of_losses(baselines)
    assert len(shown) > 5
    for parameters, figures in shown:
        near = pytest.approx(figures, abs=6e-4)  # rounded to three digits
        assert any(size == parameters and exact == near for size, exact in measured), figures
    cost = re.search(r"`--block=parallel` costs (\S+) ± (\S+)", readme).groups()
    assert [*map(float, cost)] == next(figures[1:] for _, figures in shown if figures[1:])
    lines, files = re.search(r"About (\S+) lines compute a training: (.*?`)\.\s", readme, re.DOTALL).groups()
    counts = [len((ROOT / file).read_text(encoding="utf-8").splitlines()) for file in re.findall(r"`(.+?)`", files)]
    assert len(counts) == 7 and abs(sum(counts) - int(lines.replace(",", ""))) <= 100, sum(counts)
    speeds = r"(\d\.\d\d) times as fast as nanoGPT(?:'s, and)?,? (\d\.\d\d)\s+times with"
    assert re.search(speeds, readme).groups() == re.search(speeds, nanogpt).groups()


def headings(page: Path) -> set[str]:
    """The anchors of a page's headings, spelled as GitHub does; lines of code that begin with # are none."""
    lines = re.findall(r"^#+ (.+)$", FENCED.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}


@each_page
def test_links_lead_to_files_and_headings(page):
    links = LINK.findall(page.read_text(encoding="utf-8"))
    assert page != README or {f"docs/{each.name}" for each in PAGES[1:]} <= {link.partition("#")[0] for link in links}
    for link in links:
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert ROOT.resolve() in target.parents and target.exists(), link
        assert not anchor or anchor in headings(target), link


def test_the_flags_that_do_not_combine_are_those_of_the_table():
    """Pairs of two flags of a layout, or of one and one of the model: docs/scaling.md has a table of those refused."""
    page = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8").partition("| does not combine with |")[2]
    rows = [re.findall(r"`(--\w+=[\w.]+)`", line) for line in page.partition("\n\n")[0].splitlines()[2:]]
    listed = {frozenset((flag, other)) for flag, *others in rows for other in others}
    layout = ["--parallel=fsdp", "--fsdp_offload=True", "--fsdp_reshard=False", "--dp_replicate=2", "--tp=2", "--cp=2"]
    layout += ["--pp=2", "--ep=2", "--activation_checkpoint=selective", "--activation_checkpoint=full"]
    model = [f"--{name}={value}" for name in ("block", "objective", "optimizer", "attention", "pos", "norm", "mlp")
             for value in get_args(get_type_hints(Config)[name])]  # fmt: skip
    model += ["--dropout=0.1", "--doc_mask=True", "--n_group=2", "--bias=True", "--qk_norm=True", "--window=64"]
    model += ["--value_residual=True", "--n_expert=4"]
    needs = {
        "--block=superblock": ["--layer=c+p+e", "--n_expert=4"],
        "--n_group=2": ["--block=superblock", "--layer=c+p+e", "--n_expert=4"],
        "--attention=gqa": ["--n_kv_head=6"],
        "--objective=seq2seq": ["--span_length=4"],
    }
    needs |= dict.fromkeys(layout[1:4], ["--parallel=fsdp"])
    needs["--ep=2"] = ["--n_expert=4"]
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
