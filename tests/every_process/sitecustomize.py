"""Python imports this file at the start of every process that finds the folder in PYTHONPATH."""

import os
import sys

sys.path.append(os.path.dirname(os.path.dirname(__file__)))
import jitter  # noqa: E402

jitter.start()
