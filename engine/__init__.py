"""What train.py, sample.py and evaluate.py are made of."""

import os
import signal
import sys


def start():
    """To be called before torch is imported. Ctrl-C during the imports ends the program without a traceback. Threads of
    torch's OpenMP spin for a short time when they wait for each other, unless the user has chosen: threads that spin
    take many times as long beside another busy process."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = "20000"


if sys.argv[0] == "-m":  # a module of engine is about to start as a program
    start()
