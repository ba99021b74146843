"""How commands report the errors of their users: in one line, without a traceback."""

import io
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
        raise SystemExit(1) from None
    except kinds as error:
        fail(one_line(error))


def data_errors_end_the_run(batches: Iterable) -> Iterator:
    """The same batches. An error of the data, such as a shard that was changed, ends the run in one line."""
    with user_errors():
        yield from batches


def fail(text: str, code: int = 2) -> NoReturn:
    """End the program with a line `error: ...` on stderr and this exit code."""
    if os.environ.get("LOCAL_RANK", "0").lstrip("0").isdecimal():
        # Mostly all ranks have the same error. Then the first rank reports it, and torchrun ends the others while
        # they wait here; exit code 0 keeps them out of its table of failures. A rank that is the only one with an
        # error reports it after the wait.
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
        time.sleep(FIRST_RANK_SPEAKS)
    text = shortened(text)
    say(f"error: {text}")
    if report := os.environ.get("TORCHELASTIC_ERROR_FILE"):  # torchrun shows it at the end of its own report
        with suppress(OSError):
            details = {"py_callstack": f"error: {text}", "timestamp": str(int(time.time()))}
            Path(report).write_text(json.dumps({"message": {"message": text, "extraInfo": details}}))
    raise SystemExit(code) from None


def one_line(error: Exception) -> str:
    """The message of an error in one line. Errors of the operating system get their path and a remedy."""
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.strerror}; check the path, its permissions and the free space on its disk, then try again"
        text = f"{error.filename}: {text}" if error.filename else text
    return shortened(text)


def reason(error: BaseException) -> str:
    """The first line of an error's message, without the path of the operating system's errors, or else its type."""
    return getattr(error, "strerror", None) or str(error).strip().partition("\n")[0][:200] or type(error).__name__


def shortened(text: str) -> str:
    """The text in one line, with control characters escaped. Of a very long value in it, only the ends stay."""
    text = printable(" ".join(text.split()))
    return text if len(text) <= 1000 else f"{text[:500]} ... {text[-400:]}"


def printable(line: str) -> str:
    """The line with control characters escaped, which a name in it may have."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)


def say(line: str):
    """Print a line on stderr, in place of a progress bar. A stderr that cannot be written is no reason to end."""
    erase = "\r\x1b[K" if sys.stderr.isatty() else ""
    with suppress(OSError):
        print(f"{erase}{printable(line)}", file=sys.stderr, flush=True)


class Stdout(io.FileIO):
    """The file behind stdout. The error of a write names it, and what follows goes to /dev/null, because Python's exit
    writes again what is left."""

    def write(self, data: Any) -> int | None:
        try:
            return super().write(data)
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            error.filename = "stdout"
            raise


def command(main: Callable[[], Any], kinds: Any = OSError, interruptible: bool = False):
    """Run the main function of a script, and exit with the code that it returns, or 0.

    An error of `kinds` that it raises, and an OSError of writing to stdout, become one line. With the usual `kinds`, a
    ValueError that `main` raises is a mistake in the code, and keeps its traceback. A stream that the shell has closed,
    as with `2>&-`, is replaced by /dev/null. Stdout escapes what it cannot show. Ctrl-C ends with exit code 130.
    `interruptible`: so do SIGTERM and SIGHUP, unless they are ignored, and `main` can clean up, as they raise
    KeyboardInterrupt.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if interruptible and signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))
    if (out := sys.stdout) is sys.__stdout__:  # no test has replaced it
        file = Stdout(out.fileno(), "w", closefd=False)
        buffer = file if out.write_through else io.BufferedWriter(file)  # python -u has no buffer
        how = {"line_buffering": out.line_buffering, "write_through": out.write_through}
        sys.stdout = io.TextIOWrapper(buffer, out.encoding, "backslashreplace", **how)
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
