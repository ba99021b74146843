"""Python imports this file at the start of every process that finds the folder in PYTHONPATH."""

import os
import sys

if "SUPERBLOCK_JITTER" in os.environ:
    sys.path.append(os.path.dirname(os.path.dirname(__file__)))
    import jitter

    jitter.start()
