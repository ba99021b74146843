"""Predicts what a run computes, keeps in memory and sends, before it starts."""
