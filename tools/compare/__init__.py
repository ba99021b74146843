"""Comparisons of models by trainings of their own; start one as `python -m tools.compare`."""
