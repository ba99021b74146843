"""Programs that measure, compare and look into runs; start one as `python -m tools.plot`."""

import signal
import sys

from engine import limit_spinning

if sys.argv[0] == "-m":  # a module of tools is about to start as a program
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports ends the program without a traceback
    limit_spinning()
