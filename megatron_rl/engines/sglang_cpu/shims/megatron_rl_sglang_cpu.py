"""An SGLang plugin (entry point group `sglang.srt.plugins`) for machines without a GPU.

Host buffers are not registered with CUDA, and a paused scheduler sleeps until a message comes, as an idle one does with
--sleep-on-idle: otherwise each paused server takes a core from the trainer whose weights it waits for.
"""

from __future__ import annotations

from typing import Any


def activate() -> None:
    """Called by SGLang in each of its processes."""
    import torch
    from sglang.srt.mem_cache.pool_host import common
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def allocate(dims: Any, dtype: torch.dtype, *_: Any, **__: Any) -> torch.Tensor:
        return torch.empty(dims, dtype=dtype, device="cpu")

    common.ALLOC_MEMORY_FUNCS["cpu"] = allocate

    paused = "sglang.srt.managers.scheduler.Scheduler._record_scheduler_state_for_paused_engine"
    HookRegistry.register(paused, _sleep, HookType.AFTER)


def _sleep(_: None, scheduler: Any) -> None:
    scheduler.maybe_sleep_on_idle()
