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
    model += ["--dropout=0.1", "--doc_mask=True", "--n_group=2", "--bias=True", "--qk_norm=True", "--window=64"]
    model += ["--value_residual=True", "--n_expert=4"]
    experts = ["--layer=c+p+e", "--n_expert=4"]
    needs = dict.fromkeys(of_fsdp, ["--parallel=fsdp"])
    needs |= {"--block=superblock": experts, "--n_group=2": ["--block=superblock", *experts], "--ep=2": experts[1:]}
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
