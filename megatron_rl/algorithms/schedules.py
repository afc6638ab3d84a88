"""Values that depend on the step alone, such as the learning rate; optimizers apply them elsewhere. Plain Python."""

from __future__ import annotations

import math


def learning_rate(
    step: int,
    *,
    lr: float,
    schedule: str = "constant",
    min_lr: float = 0.0,
    warmup_steps: int = 0,
    total_steps: int = 0,
) -> float:
    """Learning rate of one update.

    Warm-up rises linearly, from lr / warmup_steps on the first update (0 would waste it) to lr on the last one of the
    warm-up. The first update after it has lr; `linear` and `cosine` then reach `min_lr` on the last update.

    Args:
        step: 0 for the first update; beyond the last one the value stays.
        lr: the peak.
        schedule: constant, linear or cosine.
        min_lr: where linear and cosine end.
        warmup_steps: 0 = none.
        total_steps: all updates, warm-up included; not used by `constant`.
    """
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    if schedule == "constant":
        return lr
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - 1 - warmup_steps))
    remaining = 1.0 - progress if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return min_lr + (lr - min_lr) * remaining
