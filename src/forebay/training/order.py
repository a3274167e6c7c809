"""Random order without memory: numbers drawn from a key, and a permutation of any range that is computed, not stored.

    permuted(i, n, key):  a Feistel network of four rounds permutes the 4**b >= n numbers (left, right) of b bits each,
                          and a number that lands at n or past it is sent through again ("cycle walking") until it does not

A permutation restricted so is a permutation of range(n); 4**b < 4n + 4, so few walks are needed. Black and Rogaway,
"Ciphers with arbitrary finite domains", 2002. Not for secrets.
"""

import numpy as np

_ODD = np.uint64(0x9E3779B97F4A7C15)


def _mix(value: np.ndarray) -> np.ndarray:
    """A 64-bit finaliser (splitmix64; Steele, Lea and Flood 2014): every input bit moves every output bit."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def draw(limit: int, *key: int) -> int:
    """A number from 0 to limit - 1, decided by the non-negative integers of ``key``."""
    value = np.zeros(1, np.uint64)
    for part in key:
        value = _mix((value + np.uint64(1)) * _ODD + np.uint64(part))
    return int(value[0]) % limit


def permuted(index: np.ndarray, count: int, key: int) -> np.ndarray:
    """Where the permutation of ``range(count)`` that ``key`` chooses sends each of ``index`` (int64)."""
    bits = np.uint64(max(1, ((count - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << bits) - np.uint64(1)
    rounds = _mix(np.arange(1, 5, dtype=np.uint64) * _ODD + np.uint64(key))
    value, outside = index.astype(np.uint64), np.ones(len(index), bool)
    while outside.any():
        left, right = value[outside] >> bits, value[outside] & mask
        for number in rounds:
            left, right = right, left ^ (_mix(right + number) & mask)
        value[outside] = (left << bits) | right
        outside = value >= np.uint64(count)
    return value.astype(np.int64)
