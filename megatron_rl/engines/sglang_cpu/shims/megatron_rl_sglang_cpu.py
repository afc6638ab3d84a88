"""An SGLang plugin (entry point group `sglang.srt.plugins`): host buffers are not registered with CUDA."""

from __future__ import annotations

from typing import Any


def activate() -> None:
    """Called by SGLang in each of its processes."""
    import torch
    from sglang.srt.mem_cache.pool_host import common

    def allocate(dims: Any, dtype: torch.dtype, *_: Any, **__: Any) -> torch.Tensor:
        return torch.empty(dims, dtype=dtype, device="cpu")

    common.ALLOC_MEMORY_FUNCS["cpu"] = allocate
