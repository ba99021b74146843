"""The hash behind everything that is random in the data: orders, corruptions and splits, each a function of numbers."""

import numpy as np


def mix(x: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser, a bijection of uint64 that changes about half of the bits for each bit changed."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)
