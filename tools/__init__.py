"""Programs that measure, compare and look into runs; start one as `python -m tools.plot`."""

import engine  # before torch, whose threads it keeps from spinning for long  # noqa: F401
