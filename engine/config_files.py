"""Reads a config file, which is parsed and never executed.

It holds comments, a docstring and lines `name = value`. A value is a number, a string, True or False, an earlier name
of the same file, numbers joined by + - * / // % ** and parentheses, or strings joined by +. A name that begins with an
underscore is a variable of the file; every other name must be a flag.
"""

import ast
import difflib
import glob
import operator
import os
from pathlib import Path
from typing import Any, NamedTuple

from data.errors import require

CONSTANTS = {"true": True, "false": False}
OPERATORS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow,
    ast.UAdd: operator.pos, ast.USub: operator.neg,
}  # fmt: skip
LARGEST_FILE = 2**20  # bytes
LARGEST = 1000  # characters of a computed number or text
LARGEST_EXPONENT = 64  # so 9**9**9 is refused, not computed
NO_VALUE = (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError)  # what evaluate and ast.parse raise
ALLOWED = "a config file holds only name = value; a value is a literal or arithmetic over literals and earlier names"


class Setting(NamedTuple):
    """A flag that a config file, an argument or a checkpoint sets."""

    name: str
    value: Any
    place: str  # "file:line", "command line" or a checkpoint


def read_file(path: str) -> list[Setting]:
    """The settings of a config file. ValueError if it holds anything else."""
    if not os.path.isfile(path):
        files = glob.glob("config/*.py") + glob.glob(f"{glob.escape(path)}.py")
        near = difflib.get_close_matches(path.removesuffix(".py") + ".py", files, 1, cutoff=0.7)
        remedy = f"check the path; flags are written --name=value, such as --out_dir={path}"
        if near and not os.path.isdir(path):
            remedy = f"the nearest is {near[0]}"
        raise FileNotFoundError(f"{path}: no such config file; {remedy}")
    require(os.path.getsize(path) <= LARGEST_FILE, f"{path} has more than {LARGEST_FILE:,} bytes; {ALLOWED}")
    settings = []
    names = dict(CONSTANTS)
    line = 1
    try:
        for node in ast.parse(Path(path).read_bytes()).body:
            line = node.lineno
            match node:
                case ast.Assign(targets=[ast.Name(id=name)]):
                    names[name] = evaluate(node.value, names)
                    if not name.startswith("_"):
                        settings.append(Setting(name, names[name], f"{path}:{line}"))
                case ast.Expr(value=ast.Constant(value=str())):
                    pass  # a docstring
                case _:
                    raise ValueError(shown(node))
    except NO_VALUE as error:
        line = getattr(error, "lineno", None) or line
        raise ValueError(f"{path}:{line}: {getattr(error, 'msg', error)}; {ALLOWED}") from None
    return settings


def evaluate(node: ast.expr, names: dict[str, Any]) -> Any:
    """The value of a literal or of arithmetic over literals and `names`; one of NO_VALUE for all else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float | str):
        return node.value
    if isinstance(node, ast.Name):
        require(node.id in names, f"{node.id} is not set earlier in this file")
        return names[node.id]
    function = OPERATORS.get(type(getattr(node, "op", None)))
    if function is None:
        raise ValueError(shown(node))
    operands = [evaluate(child, names) for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
    texts = [isinstance(operand, str) for operand in operands]
    if any(texts) and not (all(texts) and function is operator.add):
        raise ValueError(shown(node))
    if function is operator.pow and abs(operands[1]) > LARGEST_EXPONENT:
        raise ValueError(f"the exponent of {shown(node)} is too large")
    result = function(*operands)
    if len(str(result)) > LARGEST:
        raise ValueError("the result is too large")
    return result


def shown(node: ast.AST) -> str:
    return ast.unparse(node).splitlines()[0][:60]
