"""How commands report the errors of their users: in one line, without a traceback.

with user_errors():             # ValueError and OSError become `error: ...` and exit code 2
    cfg = parse(Config)

command(main)                   # the whole program
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

FIRST_RANK_SPEAKS = 20  # seconds after which the first rank has reported the error that all ranks have


def require(condition: object, message: str):
    """Raise ValueError with the message unless the condition holds."""
    if not condition:
        raise ValueError(message)


@contextmanager
def user_errors(kinds: Any = (ValueError, OSError)) -> Iterator[None]:
    """Turn an error of `kinds`, one class or several, into a line `error: ...` on stderr and exit code 2."""
    try:
        yield
    except BrokenPipeError:  # the reader of stdout has ended, as in `--help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # because Python's exit flushes stdout again
        raise SystemExit(1) from None
    except kinds as error:
        fail(one_line(error))


def data_errors_end_the_run(batches: Iterable) -> Iterator:
    """The same batches. An error of the data, such as a shard that was changed, ends the run in one line."""
    with user_errors():
        yield from batches


def fail(text: str, code: int = 2) -> NoReturn:
    """End the program with a line `error: ...` on stderr and this exit code."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        # Mostly all ranks have the same error. Then the first rank reports it, and torchrun ends the others while
        # they wait here; their exit code 0 keeps them out of torchrun's table of failures. A rank that is the only
        # one with an error reports it after the wait.
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
        time.sleep(FIRST_RANK_SPEAKS)
    erase = "\r\x1b[K" if sys.stderr.isatty() else ""  # the progress bar
    text = shortened(text)
    say(f"{erase}error: {text}")
    if report := os.environ.get("TORCHELASTIC_ERROR_FILE"):  # torchrun shows it at the end of its own report
        with suppress(OSError):
            details = {"py_callstack": f"error: {text}", "timestamp": str(int(time.time()))}
            Path(report).write_text(json.dumps({"message": {"message": text, "extraInfo": details}}))
    raise SystemExit(code) from None


def one_line(error: Exception) -> str:
    """The message of an error in one line. Errors of the operating system get their path and a remedy."""
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        where = error.filename or stdout_that_fails()
        text = f"{error.strerror}; check the path, its permissions and the free space on its disk, then try again"
        text = f"{where}: {text}" if where else text
    return shortened(text)


def shortened(text: str) -> str:
    """The text in one line. It may quote a very long value, of which only the ends stay."""
    text = " ".join(text.split())
    return text if len(text) <= 1000 else f"{text[:500]} ... {text[-400:]}"


def say(line: str):
    """Print a line on stderr. A stderr that cannot be written is no reason to end."""
    with suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def stdout_that_fails() -> str:
    """The name of stdout if it cannot be written, otherwise "". What it holds then goes to /dev/null, because Python's
    exit flushes it again."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return "stdout"
    return ""


def command(main: Callable[[], Any], kinds: Any = OSError):
    """Run the main function of a script, and exit with the code that it returns, or 0.

    An error of `kinds` that it raises, and an OSError of writing to stdout, become one line. With the usual `kinds`, a
    ValueError that `main` raises is a mistake in the code, and keeps its traceback. A stream that the shell has closed,
    as with `2>&-`, is replaced by /dev/null. Ctrl-C ends the program with exit code 130.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))
    try:
        with user_errors(kinds):
            try:
                code = main()
            except SystemExit as end:  # such as that of --help
                code = end.code
            sys.stdout.flush()
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    raise SystemExit(code or 0)
