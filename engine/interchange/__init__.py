"""Reads and writes models of others: Hugging Face's, nanoGPT's and lm-eval's."""
