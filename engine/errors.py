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
from collections.abc import Callable, Iterator
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
        text = str(error)
        if isinstance(error, OSError) and error.strerror:  # the operating system's message has no remedy
            where = error.filename or stdout_that_fails()
            text = f"{error.strerror}; see to the path, its permissions and the room on its disk, then try again"
            text = f"{where}: {text}" if where else text
        fail(text)


def fail(text: str, code: int = 2) -> NoReturn:
    """End the program with a line `error: ...` on stderr and this exit code."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        # Mostly all ranks have the same error. Then the first rank reports it, and torchrun ends the others while
        # they wait here; their exit code 0 keeps them out of torchrun's table of failures. A rank that is the only
        # one with an error reports it after the wait.
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
        time.sleep(FIRST_RANK_SPEAKS)
    erase = "\r\x1b[K" if sys.stderr.isatty() else ""  # the progress bar
    text = " ".join(text.split())
    text = text if len(text) <= 1000 else f"{text[:500]} ... {text[-400:]}"  # it may quote a very long value
    print(f"{erase}error:", text, file=sys.stderr)
    if report := os.environ.get("TORCHELASTIC_ERROR_FILE"):  # torchrun shows it at the end of its own report
        with suppress(OSError):
            details = {"py_callstack": f"error: {text}", "timestamp": str(int(time.time()))}
            Path(report).write_text(json.dumps({"message": {"message": text, "extraInfo": details}}))
    raise SystemExit(code) from None


def stdout_that_fails() -> str:
    """The name of stdout if it cannot be written, otherwise "". What it holds then goes to /dev/null, because Python's
    exit flushes it again."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return "stdout"
    return ""


def command(main: Callable[[], Any]):
    """Run the main function of a script. An OSError that it raises, or that writing to stdout raises, becomes one line.

    A stream that the shell has closed, as with `2>&-`, is replaced by /dev/null. Ctrl-C ends the program with exit code
    130. A ValueError that `main` raises is a mistake in the code, and keeps its traceback.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))
    try:
        with user_errors(OSError):
            main()
            sys.stdout.flush()
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None
