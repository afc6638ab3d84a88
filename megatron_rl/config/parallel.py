"""Section `parallel:`, how the trainer's ranks share the model and the batch."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, model_validator

from .base import Processes, Section

MAX_RANKS = 1_000_000
"""Of a run; more is a slip of the keyboard."""


class ParallelConfig(Section):
    """Megatron-Core's parallel layout; world_size = TP * PP * CP * DP."""

    tensor_model_parallel_size: Processes = 1
    """Ranks that share every layer's matrices."""
    pipeline_model_parallel_size: Processes = 1
    """Stages, each holding some of the layers."""
    virtual_pipeline_model_parallel_size: int | None = Field(None, ge=2, le=10_000)
    """Model chunks per stage (interleaved schedule); null = one."""
    num_layers_in_first_pipeline_stage: int | None = Field(None, ge=1)
    """Layers of the first stage, where they are not dealt evenly; null = as many as of the others."""
    num_layers_in_last_pipeline_stage: int | None = Field(None, ge=1)
    """Layers of the last stage, likewise."""
    context_parallel_size: Processes = 1
    """Ranks that share one sequence's tokens."""
    context_parallel_exchange: Literal["p2p", "all_gather", "a2a"] = "p2p"
    """How these ranks attend to each other's tokens on GPUs: keys and values around a ring, all of them gathered, or
    heads exchanged for tokens. On CPU they are gathered."""
    data_parallel_size: Processes = 1
    """Copies of the model (of what is not an expert), each working on its own samples."""
    expert_model_parallel_size: Processes = 1
    """Ranks that share a layer's experts; they are taken from the tensor, context and data parallel ranks."""
    expert_tensor_parallel_size: Processes = 1
    """Ranks that share every expert's matrices."""
    world_size: int | None = Field(None, ge=1, le=MAX_RANKS)
    """Trainer ranks; null = the product of the sizes above. A given value must equal that product."""
    sequence_parallel: bool = False
    """Shard the norms' activations over the tensor-parallel ranks (needs tensor_model_parallel_size > 1)."""
    use_distributed_optimizer: bool = True
    """Shard optimizer state over the data-parallel ranks."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations recomputed in the backward pass: none, attention only, or whole layers."""

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one copy of the model."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size

    @property
    def group_sizes(self) -> dict[str, int | None]:
        """The sizes of Megatron's process groups, in its own words; what is left over is data parallel."""
        names = ("tensor_model", "pipeline_model", "virtual_pipeline_model", "context", "expert_model", "expert_tensor")
        return {f"{name}_parallel_size": getattr(self, f"{name}_parallel_size") for name in names}

    @property
    def microbatch_multiple(self) -> int:
        """Micro-batch counts are multiples of this: Megatron's interleaved schedule works in groups of PP."""
        return self.pipeline_model_parallel_size if self.virtual_pipeline_model_parallel_size else 1

    @property
    def sequence_multiple(self) -> int:
        """A packed sequence has a multiple of so many rows: context parallelism cuts it into 2 chunks for each rank."""
        return 2 * self.context_parallel_size if self.context_parallel_size > 1 else 1

    @property
    def row_multiple(self) -> int:
        """A packed micro-batch has a multiple of so many rows; sequence parallelism deals those of a context rank."""
        shares = self.tensor_model_parallel_size if self.sequence_parallel else 1
        return math.lcm(self.sequence_multiple, self.context_parallel_size * shares)

    @model_validator(mode="after")
    def _world(self) -> ParallelConfig:
        product = self.model_parallel_size * self.data_parallel_size
        if product > MAX_RANKS:
            raise ValueError(f"the sizes make {product} ranks, and {MAX_RANKS} are the most; lower one of them")
        if self.world_size is None:
            object.__setattr__(self, "world_size", product)
        elif self.world_size != product:
            raise ValueError(
                f"world_size={self.world_size}, but tensor {self.tensor_model_parallel_size} x pipeline "
                f"{self.pipeline_model_parallel_size} x context {self.context_parallel_size} x data "
                f"{self.data_parallel_size} = {product}; change one of the sizes, or leave world_size out"
            )
        experts = self.expert_model_parallel_size * self.expert_tensor_parallel_size
        stage = product // self.pipeline_model_parallel_size
        if stage % experts:
            raise ValueError(
                f"expert_model_parallel_size={self.expert_model_parallel_size} x expert_tensor_parallel_size="
                f"{self.expert_tensor_parallel_size} does not divide the {stage} ranks of a "
                "pipeline stage (tensor x context x data); change one of the sizes"
            )
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            raise ValueError("sequence_parallel=true needs tensor_model_parallel_size > 1; set sequence_parallel=false")
        if self.virtual_pipeline_model_parallel_size and self.pipeline_model_parallel_size == 1:
            raise ValueError(
                "virtual_pipeline_model_parallel_size needs pipeline_model_parallel_size > 1; set it to null"
            )
        for key in ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"):
            if getattr(self, key) is not None and self.pipeline_model_parallel_size == 1:
                raise ValueError(f"{key} needs pipeline_model_parallel_size > 1; set it to null")
        return self
