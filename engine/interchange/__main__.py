"""Writes the weights of a training run for transformers.

    python -m engine.interchange export RUN DIR [--dtype=bfloat16] [--remote_code=True]

RUN is a training run, its best checkpoint RUN/best, or another one of them, and DIR the folder to write, which
AutoModelForCausalLM loads. The family is the first in families.py that has the run's flags. With --remote_code=True,
our own model.py is the architecture.
"""

import signal
from dataclasses import dataclass
from typing import Literal

from configurator import parse_positional
from data.errors import command, printable, require, user_errors
from engine.interchange.huggingface import export


@dataclass
class ExportConfig:
    """The flags of export."""

    # --- weights
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"  # of the written weights
    remote_code: bool = False  # write our own model.py as the architecture


def main(argv: list[str] | None = None):
    with user_errors():
        words, options = parse_positional(ExportConfig, argv, __doc__)
        fits = len(words) == 3 and words[0] == "export"
        require(fits, f"expected export RUN DIR, not {' '.join(words) or 'nothing'}; --help says what they are")
        _, run, folder = words
        path = export(run, folder, options.dtype, options.remote_code)
        print(f"{printable(folder)}: the weights of {printable(path)}")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # an exception, after which nothing half written stays
    command(main)
