"""Programs that measure, compare and look into runs; start one as `python -m tools.plot`."""

import engine  # which lets Ctrl-C end the imports of a program, and limits the spinning of threads  # noqa: F401
