"""How the numbers of one step are collected: phase times and a flat dictionary; not how they are written or shown.

Any room may import this module; it imports none of ours. What each name means is in `metric_names`.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import SupportsFloat

MetricValue = float | None
"""A number, or None where the value was not finite."""

_NAME = re.compile(r"[A-Za-z0-9_]+(/[A-Za-z0-9_.:@-]+)+")


class StepMetrics:
    """The metrics of one step, flat `group/name` -> number.

    >>> metrics = StepMetrics()
    >>> metrics.put("reward/mean", 0.5)
    >>> metrics.merge({"grad_norm": float("nan")}, prefix="optimizer/")
    >>> metrics.as_dict()
    {'reward/mean': 0.5, 'optimizer/grad_norm': None, 'system/non_finite_metrics': 1.0}
    """

    def __init__(self) -> None:
        self._values: dict[str, MetricValue] = {}

    def put(self, name: str, value: SupportsFloat | None) -> None:
        """Record one value; anything with `__float__` is accepted, NaN and infinities are kept as None and counted.

        Raises ValueError when the name was put before (two writers of one number hide a fault) or is not `group/name`.
        """
        if not _NAME.fullmatch(name):
            raise ValueError(f"metric name {name!r} is not of the form group/name (letters, digits, _ . : @ -)")
        if name in self._values:
            raise ValueError(
                f"metric {name!r} was put twice in one step ({self._values[name]} and {value}); give one of them "
                f"a name of its own"
            )
        number = math.nan if value is None else float(value)
        self._values[name] = number if math.isfinite(number) else None

    def merge(self, values: Mapping[str, SupportsFloat | None], prefix: str = "") -> None:
        """Put every item of `values` under `prefix + name`. Raises ValueError as `put` does."""
        for name, value in values.items():
            self.put(prefix + name, value)

    def as_dict(self) -> dict[str, MetricValue]:
        """A copy in the order of insertion; `system/non_finite_metrics` is added when it is not 0."""
        missing = sum(value is None for value in self._values.values())
        return self._values | ({"system/non_finite_metrics": float(missing)} if missing else {})


class PhaseTimer:
    """Wall time of one step, split into named phases that never overlap.

    A phase entered inside another one pauses the outer one, so `time/<phase>` are shares of `time/step` and their sum
    is at most `time/step`; the rest is time outside all phases. Entering a phase again adds to it. Not thread-safe.

    >>> timer = PhaseTimer()
    >>> with timer.phase("generate"):
    ...     with timer.phase("pull"):
    ...         pass
    >>> sorted(timer.metrics())
    ['time/generate', 'time/pull', 'time/step']
    """

    def __init__(
        self, on_phase: Callable[[str], None] | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """Start the step. `on_phase(name)` is called when a phase begins or is returned to; `clock` gives seconds."""
        self._on_phase = on_phase
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._open: list[str] = []
        self._began = self._last = clock()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time inside the `with` block as `time/<name>` (an exception included). `step` is taken."""
        self._charge()
        self._seconds.setdefault(name, 0.0)
        self._open.append(name)
        self._announce()
        try:
            yield
        finally:
            self._charge()
            self._open.pop()
            self._announce()

    def metrics(self) -> dict[str, float]:
        """Seconds so far as `time/<phase>`, with `time/step` for everything since the step began."""
        self._charge()
        phases = {f"time/{name}": seconds for name, seconds in self._seconds.items()}
        return {"time/step": self._last - self._began, **phases}

    def _charge(self) -> None:
        """Book the time since the last boundary on the innermost open phase."""
        now = self._clock()
        if self._open:
            self._seconds[self._open[-1]] += now - self._last
        self._last = now

    def _announce(self) -> None:
        if self._on_phase is not None and self._open:
            self._on_phase(self._open[-1])
