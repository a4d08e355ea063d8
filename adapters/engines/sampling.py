"""Keyed draws: one uniform number for each (seed, session, turn, position), the same in every batch and process.

A draw is splitmix64 (Steele, Lea, Flood 2014: "Fast splittable pseudorandom number generators") of a 64-bit key plus a
counter: stateless, so nothing depends on what else runs, and vectorised over rows. numpy only.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1, _MIX2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def draw_key(seed: int, session: str, turn: int) -> int:
    """The 64-bit key of one generation."""
    digest = hashlib.blake2b(repr((seed, session, turn)).encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def uniforms(keys: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """[B] keys, [B] positions in the generation -> [B] float64 in (0, 1]."""
    z = keys + (positions + np.uint64(1)) * _GOLDEN  # unsigned arithmetic wraps, as the generator wants
    z = (z ^ (z >> np.uint64(30))) * _MIX1
    z = (z ^ (z >> np.uint64(27))) * _MIX2
    mantissa: npt.NDArray[np.float64] = ((z ^ (z >> np.uint64(31))) >> np.uint64(11)).astype(np.float64)
    return mantissa * 2.0**-53 + 2.0**-54
