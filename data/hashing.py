"""The hash function behind all randomness in the data: orders, corruptions and splits are pure functions of numbers."""

import numpy as np


def hash64(x: np.ndarray) -> np.ndarray:
    """Hashes each uint64 of x by splitmix64's finaliser, a bijection: one changed bit changes about half of them."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)
