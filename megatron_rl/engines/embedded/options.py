"""What the embedded engine is started with; reading configuration files and command lines is in `engines.serve`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Dtype = Literal["auto", "float32", "bfloat16"]
SPARE_ROWS = 8
"""Rows beyond those that rollouts fill, for the probe of new weights while requests run on (`rollout.mode: async`)."""
SPARE_TOKENS = 8
"""How much longer than the longest sequence the context must be: SGLang ends an answer 2 tokens before its context is
full and refuses prompts that leave fewer than 7, and so does the embedded engine."""


@dataclass(frozen=True)
class EmbeddedOptions:
    """One server.

    Raises:
        ValueError: a value outside its range; the message names it.
    """

    model: str
    """Hugging Face directory: config.json and safetensors."""
    host: str = "127.0.0.1"
    port: int = 0
    """0 binds any free port; `endpoint_file` tells which."""
    reserved_port: bool = False
    """The port is held by a supervisor that does not listen; the server binds beside it."""
    endpoint_file: str | None = None
    """Where {"url", "pid", "model"} is published once the server answers; removed at exit."""
    dtype: Dtype = "auto"
    """Number format of weights and KV cache; `auto` = what config.json says."""
    max_running_requests: int = 256
    """Sequences decoded at once; further ones wait."""
    deterministic: bool = False
    """Same bits for the same tokens, whatever runs beside them and in however many segments they are generated: kernels
    run at fixed shapes, which costs speed."""
    api_key: str | None = None
    """Bearer token wanted on all but the health routes."""
    weight_version: str = "default"
    """Name of the weights the server starts with."""
    weights_checksum: str | None = None
    """What /weights_checker must report as per_engine_checksum of these weights; None = anything."""
    context_length: int | None = None
    """Prompt and response together; None = the model's max_position_embeddings."""
    seed: int | None = None
    """Seeds requests that bring no sampling_seed; None = from the operating system."""
    num_threads: int | None = None
    """Threads of one kernel; None = what torch chooses."""
    enable_return_routed_experts: bool = False
    """Keep which experts every token was routed to, for requests that ask."""

    def __post_init__(self) -> None:
        for name in ("max_running_requests", "context_length", "num_threads"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name}={value}: must be positive")
        if not 0 <= self.port < 65536:
            raise ValueError(f"port={self.port}: must be 0 (any free port) or 1 .. 65535")
