"""Starts, saves and resumes runs; writes checkpoints that survive a crash at any instant.

run.py      a run's folder, what a run saves and restores, and where a new run gets its weights
saver.py    Checkpoints: saves, and what a failed save does to the run
files.py    save, find, read, load: step directories, latest and best; imported as `checkpoint`
contents.py the files in one step directory              weights.py  trained weights of any origin
"""
