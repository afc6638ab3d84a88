"""Megatron's optimizer and gradient buffers, and the update in two halves; no loss and no schedule here.

Gradients arrive here as plain sums over micro-batches and data-parallel ranks (see `forward.py`), in fp32 whatever the
parameters' format; bf16 parameters have an fp32 main copy inside the optimizer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from megatron_rl.policy.optimizer_state import make_moments, restore, sharded

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.optimizer import MegatronOptimizer

    from megatron_rl.config.optimizer import OptimizerConfig


_EXPERTS = ".mlp.experts."
"""In the names of parameters of which expert-parallel ranks hold different ones."""


def wrap_for_gradients(chunks: Sequence[GPTModel], use_distributed_optimizer: bool) -> list[DistributedDataParallel]:
    """Give each model chunk contiguous fp32 gradient buffers that are SUMMED over data-parallel ranks.

    With the distributed optimizer the parameters move into contiguous buffers too, and stay views of them. Experts have
    buffers, and an optimizer, of their own in every layout, summed over the ranks that hold the same ones: Megatron by
    itself takes them for ordinary parameters without expert parallelism, and then sums them over data-parallel ranks
    only, although each tensor-parallel rank may have worked on other tokens.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if _EXPERTS in name:
                parameter.allreduce = False

    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=use_distributed_optimizer,
        grad_reduce_in_fp32=True,
        average_in_collective=False,  # the loss weights hold the only normaliser
        check_for_nan_in_grad=False,  # it would raise on one rank in the middle of a schedule; see `Optimizer`
    )
    return [
        DistributedDataParallel(chunk.config, ddp_config, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]


class Optimizer:
    """AdamW of Megatron, in two halves, so that all ranks can look at the gradient before it reaches the weights.

    Decoupled weight decay, never on norms, biases and other one-dimensional parameters. With
    `use_distributed_optimizer` each data-parallel rank keeps and updates its share of the state.

    An update is `zero_grad()`, the backward passes, `gradient_norm()`, and then `apply(norm)` or nothing.
    """

    def __init__(
        self,
        chunks: Sequence[DistributedDataParallel],
        optimizer_cfg: OptimizerConfig,
        dtype: torch.dtype,
        use_distributed_optimizer: bool,
    ) -> None:
        from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
        from megatron.core.optimizer import get_megatron_optimizer

        self._chunks = list(chunks)
        self._updates = 0
        self._clip_grad = optimizer_cfg.clip_grad
        self.megatron: MegatronOptimizer = get_megatron_optimizer(
            MegatronOptimizerConfig(
                optimizer="adam",
                lr=optimizer_cfg.lr,
                min_lr=optimizer_cfg.min_lr,
                weight_decay=optimizer_cfg.weight_decay,
                decoupled_weight_decay=True,
                adam_beta1=optimizer_cfg.betas[0],
                adam_beta2=optimizer_cfg.betas[1],
                adam_eps=optimizer_cfg.eps,
                clip_grad=optimizer_cfg.clip_grad,
                bf16=dtype is torch.bfloat16,
                params_dtype=dtype,
                use_distributed_optimizer=use_distributed_optimizer,
            ),
            self._chunks,
        )
        for group in self.megatron.param_groups:
            # Megatron leaves applying its own multiplier to its scheduler, which is not used here.
            group["weight_decay"] = optimizer_cfg.weight_decay * group["wd_mult"]
        self.set_learning_rate(optimizer_cfg.lr)

    @property
    def parts(self) -> list[Any]:
        """Megatron's optimizers, one per kind of parameter."""
        return list(getattr(self.megatron, "chained_optimizers", [self.megatron]))

    def set_learning_rate(self, learning_rate: float) -> None:
        """Use this rate for the following updates."""
        for group in self.megatron.param_groups:
            group["lr"] = learning_rate * group.get("lr_mult", 1.0)

    def zero_grad(self) -> None:
        """Clear the gradient buffers; before the first backward pass of an update."""
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self.megatron.zero_grad()

    def gradient_norm(self) -> float:
        """L2 norm of the whole model's gradient, before clipping; equal on all ranks. Collective."""
        self.megatron.prepare_grads()
        return float(self.megatron.get_grad_norm())

    def apply(self, norm: float) -> None:
        """Clip to `optimizer.clip_grad` by `norm` (0 = off) and update the weights. Collective."""
        from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

        for part in self.parts:
            parameters = part.get_parameters()
            if self._clip_grad > 0 and parameters:
                decoupled = part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
                clip_grad_by_total_norm_fp32(parameters, self._clip_grad, norm, decoupled)
        self.megatron.step_with_ready_grads()
        self._updates += 1

    def reset_state(self) -> None:
        """Forget moments and step counts, as if no update had been made; fp32 main weights stay as they are."""
        self._updates = 0
        for part in self._with_parameters():
            part.optimizer.state = defaultdict(dict)
            for group in part.optimizer.param_groups:
                group.pop("step", None)  # fused Adam counts steps per group

    def sharded_state(self, model_state: dict[str, Any], *, is_loading: bool) -> dict[str, Any]:
        """State for a Megatron distributed checkpoint, see `optimizer_state`. Collective.

        Args:
            model_state: sharded state of the model chunks, by the names `model` or `model0`, `model1` ...
            is_loading: make room for what will be read.
        """
        tensors = {}
        for number, part in enumerate(self._with_parameters()):
            make_moments(part, self._updates)
            tensors[number] = sharded(part, model_state, is_loading=is_loading)
        return {"updates": self._updates, "tensors": tensors}

    def load_sharded_state(self, state: dict[str, Any]) -> None:
        """Take over what was read, given what `sharded_state` returned for it."""
        self._updates = state["updates"]
        for number, part in enumerate(self._with_parameters()):
            restore(part, state["tensors"].get(number, {}))
            make_moments(part, self._updates)

    def _with_parameters(self) -> Iterator[Any]:
        """Megatron's optimizers, without placeholders where this rank has nothing of a kind."""
        return (part for part in self.parts if not getattr(part, "is_stub_optimizer", False))
