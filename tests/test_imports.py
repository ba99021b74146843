"""Modules import each other in one direction: commands and tools -> engine -> configurator -> model -> ops and flags,
and data imports none of these. Three modules of engine are parts of the configurator."""

import ast
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.helpers import ROOT

FILES = [*ROOT.glob("*.py")]
for top in ("data", "engine", "tools"):
    FILES += ROOT.glob(f"{top}/**/*.py")
MODULE = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in FILES}
SOURCE = {name: path.read_text(encoding="utf-8") for name, path in MODULE.items()}
COMMANDS = {name for name, source in SOURCE.items() if '\nif __name__ == "__main__":' in source}
LEVEL = {"ops": 0, "flags": 0, "model": 1, "data": 1, "configurator": 2, "engine": 3, "tools": 4}  # commands: 5
LEVEL |= {"engine.config_files": 1, "engine.help": 1, "engine.retired": 1}


@cache
def imports(name: str) -> set[str]:
    """Full names of what a module imports, also inside of functions: of `from a import b` both a and a.b."""
    names = set()
    for node in ast.walk(ast.parse(SOURCE[name])):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:  # relative: of the exported package alone
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names - {name}


def level(name: str) -> int:
    return LEVEL.get(name, LEVEL.get(name.partition(".")[0], 5))


@pytest.mark.parametrize("name", sorted(MODULE))
def test_a_module_imports_nothing_from_above(name):
    ours = imports(name) & MODULE.keys()
    above = [other for other in ours if level(other) > level(name)]
    assert not above
    assert not ours & COMMANDS, "what two commands need belongs in a module that is none"
    assert "model" not in ours or not name.startswith("data.")
    if level(name) < 2 and not name.startswith(("data.", "engine.")):
        known = {"torch", "ops", "flags"} | sys.stdlib_module_names
        for other in imports(name):
            assert other.partition(".")[0] in known


def test_no_packages_of_engine_import_each_other_in_a_circle():
    """Their __main__ are commands, which may import all."""
    packages = {}
    for name in MODULE:
        package = ".".join(name.split(".")[:2])
        if name.startswith("engine.") and name.count(".") == 2 and not name.endswith("__main__"):
            others = {".".join(other.split(".")[:2]) for other in imports(name) if other.count(".") == 2}
            packages.setdefault(package, set()).update(others - {package})
    assert [*TopologicalSorter({name: packages[name] & packages.keys() for name in packages}).static_order()]


def test_no_modules_import_each_other_in_a_circle():
    needed = {name: imports(name) & MODULE.keys() for name in MODULE}
    try:
        order = list(TopologicalSorter(needed).static_order())
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))
    assert order.index("flags") < order.index("model") < order.index("train")
