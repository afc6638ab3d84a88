"""The largest of several errors, in a way that sees NaN; holds no tests."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


def worst(errors: Iterable[float]) -> float:
    """The largest (0 of none), NaN when any is: Python's own `max` passes over a NaN that is not the first."""
    return float(np.max([0.0, *errors]))
