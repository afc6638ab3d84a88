"""Section `engine:`, the generation servers that the run starts or talks to."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from .base import Seconds, Section


class EngineConfig(Section):
    """Generation replicas that speak SGLang's HTTP protocol."""

    kind: Literal["embedded"] = "embedded"
    """`embedded`: transformers on the CPU, started by the run."""
    urls: list[str] = Field(default_factory=list)
    """Servers that already run; when given, none is started."""
    replicas: int = Field(1, ge=1)
    """Servers to start."""
    max_running_requests: int = Field(512, ge=1)
    """Sequences that one server decodes at once."""
    dtype: Literal["float32", "bfloat16", "model"] = "model"
    """Number format of the server's weights; `model` = model.dtype."""
    ready_timeout_s: Seconds = 300.0
    """Deadline for a started server to answer."""
    update_timeout_s: Seconds = 600.0
    """Deadline of one weight update over all servers."""
    keep_versions: int = Field(2, ge=1)
    """Weight version directories kept on disk."""
