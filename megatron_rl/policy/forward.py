"""Packed micro-batches through Megatron's schedule, and what its last stage makes of hidden states; no optimizer.

Every normaliser is counted globally and already inside `weights` (`algorithms.token_weights`), so gradients must be
plain SUMS over micro-batches and data-parallel ranks. Megatron would scale them in five places; each is switched off:

| place in megatron-core                             | its factor                      | why it does not act           |
|----------------------------------------------------|---------------------------------|-------------------------------|
| schedules.forward_step_calc_loss, two loss results | CP / num_microbatches           | `LossHead` returns three      |
| the same, three loss results                       | 1 / (tokens num_microbatches)   | `calculate_per_token_loss`    |
| DistributedDataParallel, gradient_scaling_factor   | 1 / DP                          | `calculate_per_token_loss`    |
| the same, average_in_collective                    | mean instead of sum             | False in `optimizer.py`       |
| finalize_model_grads                               | 1 / tokens                      | `sum_gradients` passes None   |

`grad_scale_func` stays None: bf16 needs no loss scale. tests/parallel/test_policy_parity.py fails for any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor

from megatron_rl.algorithms.losses import Sequences
from megatron_rl.algorithms.spec import LossSpec
from megatron_rl.algorithms.token_statistics import token_statistics
from megatron_rl.kernels import PolicyLossOutput, linear_logprob, linear_policy_loss, policy_loss
from megatron_rl.policy.batch import TOKEN_FIELDS
from megatron_rl.policy.packing import MicroBatch
from megatron_rl.weights.mapping import unwrap

if TYPE_CHECKING:
    import torch.distributed as dist

    from megatron_rl.policy.replay import RoutingPass


@dataclass(frozen=True)
class Projection:
    """How hidden states become log-probs, the same for all micro-batches of a run."""

    vocab_size: int
    """True vocabulary; the output weight is padded beyond it."""
    group: dist.ProcessGroup | None = None
    """Tensor-parallel ranks, over which the vocabulary is split."""
    sequence_parallel: bool = False
    """Each of them has a part of the rows of the hidden states."""
    chunk_tokens: int = 4096
    """Tokens whose logits exist at a time."""
    logprob_backend: Literal["auto", "te"] = "auto"
    """Of the loss; forward passes always use our own kernels. `te` has no entropy."""

    def options(self, microbatch: MicroBatch) -> dict[str, Any]:
        """Keywords of the operators of `kernels`."""
        return {
            "group": self.group,
            "temperature": microbatch.temperature,
            "vocab_size": self.vocab_size,
            "chunk_tokens": self.chunk_tokens,
            "sequence_parallel": self.sequence_parallel,
        }


class Head(Protocol):
    """What the last pipeline stage does with one micro-batch's hidden states [1, T, H] ([1, T / TP, H])."""

    def __call__(self, microbatch: MicroBatch, weight: Tensor | None, hidden: Tensor) -> Any: ...


@dataclass(frozen=True)
class LossHead:
    """Loss, statistics and finiteness of one micro-batch.

    Returns `(loss, 0, {"sums": ..., "non_finite": ...})`: the loss is a scalar SUM with gradient, the token count is 0
    since Megatron must not divide by it, `sums` are float64 scalars that add up over micro-batches, and `non_finite`
    [T] marks trainable rows with a NaN or infinite value in any of their arrays. Nothing is raised for it here: other
    ranks are in the middle of their schedule.
    """

    spec: LossSpec
    projection: Projection
    with_entropy: bool = True
    """Compute the entropy for the metrics; it is computed anyway when it has a coefficient."""
    sum_over_context: Callable[[Tensor], Tensor] | None = None
    """Adds up [K, S] over the ranks that share the sequences (context parallelism); None: sequences are whole."""

    def __call__(
        self, microbatch: MicroBatch, weight: Tensor | None, hidden: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Any]]:
        assert weight is not None
        mine = microbatch.sequences
        sequences = Sequences(mine.index, mine.lengths, self.sum_over_context)
        found = linear_policy_loss(
            hidden.squeeze(0),
            weight,
            microbatch.targets,
            objective=partial(self._objective, microbatch, sequences),
            sequence_starts=microbatch.sequence_starts if self.spec.needs_sequences else None,
            equal_cuts=self.sum_over_context is not None,
            with_entropy=bool(self.spec.entropy_coef)
            or (self.with_entropy and self.projection.logprob_backend != "te"),
            logprob_backend=self.projection.logprob_backend,
            main_grad=_main_grad(weight),
            **self.projection.options(microbatch),
        )
        sums = token_statistics(
            found.log_probs,
            microbatch.trainable,
            old_log_probs=microbatch.old_log_probs,
            flags=found.flags,
            entropy=found.entropy,
            reference_log_probs=microbatch.reference_log_probs,
            behaviour_log_probs=microbatch.behaviour_log_probs,
            spec=self.spec,
            sequences=sequences,
        )
        report = {"sums": {"loss": found.loss.detach(), **sums}, "non_finite": _non_finite(microbatch, found.log_probs)}
        return found.loss, torch.zeros((), dtype=torch.int, device=hidden.device), report

    def _objective(
        self, microbatch: MicroBatch, sequences: Sequences, rows: Tensor, log_probs: Tensor, entropy: Tensor | None
    ) -> PolicyLossOutput:
        """The loss of the rows of one chunk."""

        def part(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[rows]

        assert microbatch.weights is not None
        return policy_loss(
            log_probs,
            self.spec,
            weights=microbatch.weights[rows],
            old_log_probs=part(microbatch.old_log_probs),
            advantages=part(microbatch.advantages),
            behaviour_log_probs=part(microbatch.behaviour_log_probs) if self.spec.needs_behaviour else None,
            reference_log_probs=part(microbatch.reference_log_probs) if self.spec.kl_coef else None,
            entropy=entropy if self.spec.entropy_coef else None,
            trainable=microbatch.trainable[rows],
            sequences=Sequences(sequences.index[rows], sequences.lengths, sequences.sum_over_ranks),
        )


@dataclass(frozen=True)
class LogProbHead:
    """`(log_probs [T], entropy [T] or None)` of one micro-batch, float32."""

    projection: Projection
    with_entropy: bool

    def __call__(
        self, microbatch: MicroBatch, weight: Tensor | None, hidden: Tensor, non_loss_data: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        assert weight is not None
        return linear_logprob(
            hidden.squeeze(0),
            weight,
            microbatch.targets,
            with_entropy=self.with_entropy,
            **self.projection.options(microbatch),
        )


def run_schedule(
    chunks: Sequence[torch.nn.Module],
    microbatches: Sequence[MicroBatch],
    head: Head,
    *,
    forward_only: bool,
    routing: RoutingPass | None = None,
) -> list[Any]:
    """All micro-batches through all pipeline stages, backward too unless `forward_only`. Collective.

    Args:
        chunks: this rank's model chunks (data-parallel wrappers when gradients are wanted).
        microbatches: of this data-parallel rank, the same objects on all its model-parallel ranks.
        head: `LossHead`, or `LogProbHead` with `forward_only`.
        routing: what the routers of a mixture of experts do; None: they choose, and nobody looks.

    Returns:
        The head's report of every micro-batch, in order, on the last pipeline stage; an empty list on the others.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    iterators = [iter(microbatches) for _ in chunks]  # every virtual stage goes through all of them
    reports: list[Any] = get_forward_backward_func()(
        forward_step_func=partial(_forward_step, head, routing),
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=list(chunks),
        num_microbatches=len(microbatches),
        seq_length=max(microbatch.num_rows for microbatch in microbatches),
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )
    return reports


def sum_gradients(model: list[torch.nn.Module], num_tokens: Tensor | None, **options: Any) -> None:
    """Megatron's gradient finalisation (data-parallel sum, norms under sequence parallelism, tied embeddings) without
    its division by `num_tokens`; to be the `finalize_model_grads_func` of a model's config."""
    from megatron.core.distributed import finalize_model_grads

    finalize_model_grads(model, None, **options)


def _forward_step(
    head: Head, routing: RoutingPass | None, microbatches: Iterator[MicroBatch], model: torch.nn.Module
) -> tuple[Tensor, Any]:
    microbatch, bare = next(microbatches), unwrap(model)
    with routing.forward(microbatch, bare) if routing is not None else nullcontext():
        output = model(microbatch.tokens, microbatch.position_ids, None, packed_seq_params=microbatch.packed_seq_params)
    return output, partial(head, microbatch, bare.output_weight if bare.post_process else None)


def _main_grad(weight: Tensor) -> Tensor | None:
    """Megatron's float32 gradient buffer of the output weight, told that its gradient arrives there by itself.

    As where Megatron fuses gradient accumulation: the data-parallel wrapper then adds nothing for this use of the
    weight. (What a tied embedding adds by autograd it still adds: such weights are marked `zero_out_wgrad`.)
    """
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    return weight.main_grad  # type: ignore[attr-defined]


def _non_finite(microbatch: MicroBatch, log_probs: Tensor) -> Tensor:
    finite = torch.isfinite(log_probs)
    for name in TOKEN_FIELDS:
        if (values := getattr(microbatch, name)) is not None:
            finite = finite & torch.isfinite(values)
    return microbatch.trainable & ~finite
