"""Reads and writes models of others: Hugging Face's and nanoGPT's."""
