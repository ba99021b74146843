"""Checkpoints that survive a crash at any instant. engine/resume.py says what a run saves and restores.

saver.py        Checkpoints: saves, and what a failed save does to the run
files.py        save, find, read, load: step directories, latest and best; imported as `checkpoint`
file_format.py  the files in one step directory
"""
