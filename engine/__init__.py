"""What train.py, sample.py and evaluate.py are made of."""

import signal
import sys

if sys.argv[0] == "-m":  # a module of engine is about to start as a program
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports ends the program without a traceback
