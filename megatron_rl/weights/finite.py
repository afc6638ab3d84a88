"""Whether a tensor holds numbers alone; what is said where it does not is decided by whoever asks."""

from __future__ import annotations

import torch
from torch import Tensor


def is_finite(data: Tensor) -> bool:
    """No NaN and no infinity; True of what is empty, of whole numbers and of fp8, which are not looked at."""
    if not data.dtype.is_floating_point or data.numel() == 0 or data.dtype.itemsize == 1:
        return True
    # One pass without a temporary, bound by memory: NaN comes through as both, infinity as one of them.
    low, high = torch.aminmax(data)
    return bool(torch.isfinite(low) & torch.isfinite(high))
