"""What train.py, sample.py and evaluate.py are made of."""

import os
import signal
import sys


def start():
    """To be called before torch is imported. Ctrl-C during the imports ends the program without a traceback. Unless the
    user has chosen, torch's C++ reports errors alone, as a warning about a lost rank has 50 lines, and threads of its
    OpenMP spin for a short time as they wait: threads that spin take many times as long beside another busy process."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = "20000"


if sys.argv[0] == "-m":  # a module of engine is about to start as a program
    start()
