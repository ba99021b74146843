"""Preparing and loading data. With this file `import data` finds this folder before an installed package `data`."""

import signal
import sys

if sys.argv[0] == "-m" or sys.argv[0].endswith("prepare.py"):  # a program of data is about to start
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports ends it without a traceback

from pathlib import Path

DATA = Path(__file__).resolve().parent  # dataset=NAME is a folder in it
