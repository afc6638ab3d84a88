"""Megatron's optimizer and gradient buffers, and the update in two halves; no loss and no schedule here.

Gradients arrive here as plain sums over micro-batches and data-parallel ranks (see `forward.py`), in fp32 whatever the
parameters' format; bf16 parameters have an fp32 main copy inside the optimizer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from megatron_rl.policy import upstream_fixes

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.optimizer import MegatronOptimizer

    from megatron_rl.config.optimizer import OptimizerConfig


def wrap_for_gradients(chunks: Sequence[GPTModel], use_distributed_optimizer: bool) -> list[DistributedDataParallel]:
    """Give each model chunk contiguous fp32 gradient buffers that are SUMMED over data-parallel ranks.

    With the distributed optimizer the parameters move into contiguous buffers too, and stay views of them.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

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

        upstream_fixes.apply()
        self._chunks = list(chunks)
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

    def reset_state(self) -> None:
        """Forget moments and step counts, as if no update had been made; fp32 main weights stay as they are."""
        for part in self.parts:
            if getattr(part, "is_stub_optimizer", False):
                continue
            part.optimizer.state = defaultdict(dict)
            for group in part.optimizer.param_groups:
                group.pop("step", None)  # fused Adam counts steps per group

    def sharded_state(self, model_state: dict[str, Any], *, is_loading: bool) -> Any:
        """State for a Megatron distributed checkpoint, by the parameters' global names. Collective.

        Args:
            model_state: sharded state of the model chunks, by the names `model` or `model0`, `model1` ...
            is_loading: make room for what will be read.
        """
        for part in self.parts:
            # torch's Adam has no state before its first step, and Megatron cannot then say what to read or write.
            if isinstance(getattr(part, "optimizer", None), torch.optim.Adam) and not part.optimizer.state:
                _write_out_initial_state(part.optimizer)
        return self.megatron.sharded_state_dict(model_state, is_loading=is_loading, metadata=checkpoint_metadata())

    def load_sharded_state(self, state: Any) -> None:
        """Take over what was read; call `set_learning_rate` afterwards, since the stored rate comes with it."""
        self.megatron.load_state_dict(state)


def _write_out_initial_state(adam: torch.optim.Adam) -> None:
    """The state from which Adam would start, made explicit: the next update is the same, bit by bit."""
    for group in adam.param_groups:
        for parameter in group["params"]:
            if parameter.numel():
                zeros = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                adam.state[parameter] = {"step": torch.tensor(0.0), **zeros}


def checkpoint_metadata() -> dict[str, Any]:
    """How Megatron is to lay out a checkpoint: every tensor in its model's shape, readable at another layout."""
    from megatron.core import parallel_state

    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
