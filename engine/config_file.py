"""Reads config files and the values of flags without executing them; configurator.py says what they may hold.

read_file("config/x.py")            [("n_layer", 12, "config/x.py:3"), ...]
from_text("2**10", int)             1024, for a flag on the command line
coerce(1e3, int)                    1000; ValueError for 64.5
"""

import ast
import operator
import os
import sys
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin

from engine.errors import require

CONSTANTS = {"true": True, "false": False}
OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
LARGEST_FILE = 2**20  # bytes
LARGEST = 4096  # bits of a computed integer, or characters of a joined string; so 9**9**9 is refused, not computed
ALLOWED = "a config file holds only name = value; a value is a literal or arithmetic over literals and earlier names"


def evaluate(node: ast.expr, names: dict[str, Any]) -> Any:
    """The value of a literal or of arithmetic over literals and `names`. ValueError or ArithmeticError for others."""
    if isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float, str)):
        return node.value
    if isinstance(node, ast.Name):
        require(node.id in names, f"{node.id} is not set earlier in this file; {ALLOWED}")
        return names[node.id]
    if not isinstance(node, (ast.UnaryOp, ast.BinOp)) or type(node.op) not in OPERATORS:
        refuse(node)
    operands = [evaluate(child, names) for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
    if isinstance(node.op, ast.Add) and all(isinstance(x, str) for x in operands):
        sizes = [len(x) for x in operands]
    elif all(isinstance(x, (int, float)) for x in operands):
        sizes = [x.bit_length() if isinstance(x, int) else 0 for x in operands]
    else:
        refuse(node)
    size = sizes[0] * operands[1] if isinstance(node.op, ast.Pow) else sum(sizes)
    require(size <= LARGEST, f"the result is too large; write a number of at most {LARGEST} bits, or a shorter text")
    return OPERATORS[type(node.op)](*operands)


def refuse(node: ast.AST) -> NoReturn:
    raise ValueError(f"{ast.unparse(node).splitlines()[0][:60]}: {ALLOWED}")


def from_text(text: str, kind: Any) -> Any:
    """The value that a text on the command line means for a flag of this type; the text itself if it has no value."""
    try:
        if kind is not str:
            return evaluate(ast.parse(text.strip(), mode="eval").body, CONSTANTS)
        return ast.literal_eval(text) if text[:1] in ("'", '"') else text
    except (ValueError, ArithmeticError, SyntaxError, RecursionError, MemoryError):
        return text


def alternatives(kind: Any) -> list[Any]:
    """bool | Literal["auto"] -> [bool, "auto"]."""
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    return [alternative for part in get_args(kind) for alternative in alternatives(part)] or [kind]


def choices(kind: Any) -> list[str]:
    """bool | Literal["auto"] -> ["True", "False", "auto"], int -> ["int"]."""
    words = [["True", "False"] if a is bool else [getattr(a, "__name__", a)] for a in alternatives(kind)]
    return sum(words, [])


def coerce(value: Any, kind: Any) -> Any:
    """`value` in the type `kind`, if the conversion loses nothing; otherwise ValueError."""
    for wanted in alternatives(kind):
        if value == wanted or (type(value) is wanted and wanted is not float):
            return value
        if wanted is float and type(value) in (int, float) and abs(value) <= sys.float_info.max:  # no nan, no inf
            if float(value) == value:
                return float(value)
        if wanted is int and type(value) is float and abs(value) <= 2**53 and value.is_integer():
            return int(value)
    raise ValueError


def read_file(path: str) -> list[tuple[str, Any, str]]:
    """The settings of a config file as [(name, value, "path:line"), ...]. ValueError if it holds anything else."""
    if not os.path.isfile(path):
        raise FileNotFoundError(f"{path}: no such config file; flags are written --name=value")
    require(os.path.getsize(path) <= LARGEST_FILE, f"{path} has more than {LARGEST_FILE:,} bytes; {ALLOWED}")
    settings, names, line = [], dict(CONSTANTS), 1
    try:
        for node in ast.parse(Path(path).read_bytes()).body:
            line = node.lineno
            match node:
                case ast.Assign(targets=[ast.Name(id=name)]):
                    names[name] = evaluate(node.value, names)
                    if not name.startswith("_"):
                        settings.append((name, names[name], f"{path}:{line}"))
                case ast.Expr(value=ast.Constant(value=str())):
                    pass  # a docstring
                case _:
                    refuse(node)
    except SyntaxError as error:
        raise ValueError(f"{path}:{error.lineno or line}: {error.msg}; {ALLOWED}") from None
    except (RecursionError, MemoryError):
        raise ValueError(f"{path}:{line}: too deeply nested; write the value itself") from None
    except ArithmeticError as error:
        raise ValueError(f"{path}:{line}: {error.args[-1]}; write a value that can be computed") from None
    except ValueError as error:
        raise ValueError(f"{path}:{line}: {error.args[-1]}") from None
    return settings
