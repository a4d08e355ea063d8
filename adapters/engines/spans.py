"""Version spans from versions token by token."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from uniagent.engine.ports import VersionSpan


def version_spans(versions: Sequence[int] | npt.NDArray[np.int32]) -> tuple[VersionSpan, ...]:
    """[T] -> runs of equal versions, covering all tokens in order."""
    each = np.asarray(versions)
    if not len(each):
        return ()
    edges = [0, *(np.flatnonzero(each[1:] != each[:-1]) + 1).tolist(), len(each)]
    return tuple(VersionSpan(int(each[a]), a, b) for a, b in pairwise(edges))
