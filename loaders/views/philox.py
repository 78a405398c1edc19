"""Counter-based random numbers: Philox4x32-10 (Salmon et al., SC 2011).

A draw is named by (seed, epoch, sample index, stream, number); there is no generator state. So the same name gives the
same value in every process, on every world size, after any resume and in any order. Streams keep the crops and views
of one sample apart; numbers count the draws within a stream.
"""

import numpy as np

from loaders.jit import jit

_MASK = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))


@jit
def philox4x32(c0, c1, c2, c3, k0, k1):  # type: ignore[no-untyped-def]
    """Encrypt the counter (c0..c3) by the key (k0, k1): four uint32 in uint64."""
    c0, c1, c2, c3 = np.uint64(c0), np.uint64(c1), np.uint64(c2), np.uint64(c3)
    k0, k1 = np.uint64(k0), np.uint64(k1)
    for _ in range(10):
        low, high = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (high >> _SHIFT) ^ c1 ^ k0, high & _MASK, (low >> _SHIFT) ^ c3 ^ k1, low & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


@jit
def uniform(seed, epoch, index, stream, number):  # type: ignore[no-untyped-def]
    """Draw ``number`` of a stream as a float64 in [0, 1) with 53 random bits."""
    key = np.uint64(seed)
    a, b, _, _ = philox4x32(number, stream, index, epoch, key & _MASK, key >> _SHIFT)
    return ((a >> np.uint64(5)) * 67108864.0 + (b >> np.uint64(6))) / 9007199254740992.0


@jit
def integer(seed, epoch, index, stream, number, bound):  # type: ignore[no-untyped-def]
    """Draw ``number`` of a stream as an integer in [0, bound)."""
    return int(uniform(seed, epoch, index, stream, number) * bound)


@jit
def sort_keys(seed, epoch, count, stream):  # type: ignore[no-untyped-def]
    """Draw uint64 (count,) keys, one for each index: sorting by them shuffles."""
    keys = np.empty(count, np.uint64)
    key = np.uint64(seed)
    for index in range(count):
        a, b, _, _ = philox4x32(0, stream, index, epoch, key & _MASK, key >> _SHIFT)
        keys[index] = (a << _SHIFT) | b
    return keys
