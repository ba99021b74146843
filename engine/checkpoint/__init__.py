"""Starts, saves and resumes runs; writes checkpoints that survive a crash at any instant."""
