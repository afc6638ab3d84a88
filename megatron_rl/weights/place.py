"""What a rank is in the export of weights: which pipeline stage, and whether it sends; asks Megatron, sends nothing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """This rank's part.

    Attributes:
        stage: of the pipeline, `stages` in all.
        exports: it belongs to the first replica of the model (data and context parallel), whose weights leave.
        sends: of the ranks that export a stage, the one that has the whole tensors in hand: tensor-parallel rank 0.
    """

    stage: int
    stages: int
    exports: bool
    sends: bool

    @classmethod
    def of_this_rank(cls) -> Place:
        from megatron.core import parallel_state

        exports = parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
        return cls(
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_pipeline_model_parallel_world_size(),
            exports,
            exports and parallel_state.get_tensor_model_parallel_rank() == 0,
        )
