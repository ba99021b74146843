"""Commands for models of others.

    python -m engine.interchange export RUN DIR [--dtype=bfloat16] [--which=best] [--remote-code]

`export` writes the weights of a training run such that transformers' AutoModelForCausalLM loads them. The family is the
first in families.py that has the run's flags. With --remote-code, our own model.py is the architecture.
"""

import re
import signal
import sys

from engine.errors import command, user_errors
from engine.interchange.huggingface import export

USAGE = "usage: python -m engine.interchange export RUN DIR [--dtype=bfloat16] [--which=best] [--remote-code]"


def main(argv: list[str]) -> int:
    """Run the command that these arguments make; returns the exit code."""
    flags = [arg for arg in argv if arg.startswith("--")]
    known = all(re.fullmatch(r"--(remote-code|dtype=(float32|bfloat16|float16)|which=(best|latest))", x) for x in flags)
    match [arg for arg in argv if arg not in flags]:
        case ["export", run, folder] if known:
            with user_errors():
                options = dict(flag[2:].split("=") for flag in flags if "=" in flag)
                path = export(run, folder, remote_code="--remote-code" in flags, **options)
                print(f"{folder}: the weights of {path}")
            return 0
    if {"-h", "--help"} & set(argv):
        print(__doc__.strip())
        return 0
    with user_errors():
        raise ValueError(f"these arguments make no command: {' '.join(argv) or 'none'}; {USAGE}")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # an exception, after which nothing half written stays
    command(lambda: sys.exit(main(sys.argv[1:])))
