"""Modules import each other in one direction: commands and tools -> engine -> configurator -> model -> ops and flags,
and data imports none of these. Two modules of engine are parts of the configurator."""

import ast
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.helpers import ROOT

FILES = [*ROOT.glob("*.py"), *(path for top in ("data", "engine", "tools") for path in ROOT.glob(f"{top}/**/*.py"))]
MODULE = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in FILES}
COMMANDS = {name for name, path in MODULE.items() if '\nif __name__ == "__main__":' in path.read_text(encoding="utf-8")}
LEVEL = {"ops": 0, "flags": 0, "model": 1, "data": 1, "configurator": 2, "engine": 3, "tools": 4}  # commands: 5
LEVEL |= {"engine.help": 1, "engine.retired": 1}


@cache
def imports(name: str) -> set[str]:
    """Full names of what a module imports, also inside of functions: of `from a import b` both a and a.b."""
    names = set()
    for node in ast.walk(ast.parse(MODULE[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:  # relative: of the exported package alone
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names - {name}


def level(name: str) -> int:
    return LEVEL.get(name, LEVEL.get(name.partition(".")[0], 5))


@pytest.mark.parametrize("name", sorted(MODULE))
def test_a_module_imports_nothing_from_above(name):
    ours = imports(name) & MODULE.keys()
    assert not {other for other in ours if level(other) > level(name)}
    assert not ours & COMMANDS, "what two commands need belongs in a module that is none"
    assert "model" not in ours or not name.startswith("data.")
    if level(name) < 2 and not name.startswith(("data.", "engine.")):
        known = {"torch", "ops", "flags"} | sys.stdlib_module_names
        assert {other.partition(".")[0] for other in imports(name)} <= known


def test_no_modules_import_each_other_in_a_circle():
    try:
        order = list(TopologicalSorter({name: imports(name) & MODULE.keys() for name in MODULE}).static_order())
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))
    assert order.index("flags") < order.index("model") < order.index("train")
