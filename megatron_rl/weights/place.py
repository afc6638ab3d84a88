"""What a rank is in the export of weights: its pipeline stage, what it gives, whether it sends; nothing is sent."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """This rank's part. One rank of each pipeline stage has all the stage's tensors in hand and sends them, its first:
    it has rank 0 in every tensor, context, data, expert and expert-tensor parallel group.

    Attributes:
        stage: of the pipeline, `stages` in all.
        gives_dense: its replica of what is no expert's is the one that leaves (the first, by data and context).
        gives_experts: its replica of the experts is the one that leaves (the first, by expert data).
        relays: finished buckets of experts go through it, from the expert-parallel rank that has them to the others.
        sends: it has the whole tensors in hand.
    """

    stage: int
    stages: int
    gives_dense: bool
    gives_experts: bool
    relays: bool
    sends: bool

    @property
    def exports(self) -> bool:
        """Whether it takes part at all."""
        return self.gives_dense or self.gives_experts

    @classmethod
    def of_this_rank(cls, everywhere: bool = False) -> Place:
        """`everywhere`: all replicas do it for themselves, so that in the end every rank has the whole tensors."""
        from megatron.core import parallel_state

        dense = everywhere or parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
        experts = everywhere or parallel_state.get_expert_data_parallel_rank() == 0
        return cls(
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_pipeline_model_parallel_world_size(),
            gives_dense=dense,
            gives_experts=experts,
            relays=everywhere or (experts and parallel_state.get_expert_tensor_parallel_rank() == 0),
            sends=everywhere or (dense and parallel_state.get_tensor_model_parallel_rank() == 0),
        )
