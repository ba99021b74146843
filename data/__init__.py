"""Preparing and loading data. With this file `import data` finds this folder before an installed package `data`."""

from pathlib import Path

DATA = Path(__file__).resolve().parent  # dataset=NAME is a folder in it
