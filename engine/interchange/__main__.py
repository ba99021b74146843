"""Commands for models of others.

    python -m engine.interchange export RUN DIR [--dtype=bfloat16] [--which=best] [--remote-code]

`export` writes the weights of a training run such that transformers' AutoModelForCausalLM loads them. The family is the
first in families.py that has the run's flags. With --remote-code, our own model.py is the architecture.
"""

import signal

from data.command import Parser
from data.errors import command, printable, user_errors
from engine.interchange.huggingface import export


def main(argv: list[str] | None = None):
    with user_errors():
        parser = Parser(__doc__)
        parser.add_argument("command", choices=["export"])
        parser.add_argument("run", help="a training run, or one of its checkpoints")
        parser.add_argument("folder", help="the folder to write")
        dtypes = ("float32", "bfloat16", "float16")
        parser.add_argument("--dtype", choices=dtypes, default="float32", help="of the written weights")
        parser.add_argument("--which", choices=("latest", "best"), default="latest", help="checkpoint of the run")
        parser.add_argument("--remote-code", action="store_true", help="write our own model.py as the architecture")
        args = parser.parse_args(argv)
        path = export(args.run, args.folder, args.dtype, args.which, args.remote_code)
        print(f"{printable(args.folder)}: the weights of {printable(path)}")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # an exception, after which nothing half written stays
    command(main)
