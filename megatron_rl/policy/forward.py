"""Packed micro-batches through Megatron's pipeline schedule, and what its last stage makes of the logits; no optimizer.

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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from megatron_rl.algorithms.losses import policy_loss
from megatron_rl.algorithms.spec import LossSpec
from megatron_rl.algorithms.token_statistics import token_statistics
from megatron_rl.kernels import vocab_parallel_logprob
from megatron_rl.policy.packing import MicroBatch

if TYPE_CHECKING:
    import torch.distributed as dist


@dataclass(frozen=True)
class Vocabulary:
    """How logits are split: over the tensor-parallel `group`, padded beyond the true `size`."""

    group: dist.ProcessGroup | None
    size: int


class Head(Protocol):
    """What the last pipeline stage does with one micro-batch's logits [T, V / TP]."""

    def __call__(self, microbatch: MicroBatch, logits: Tensor) -> Any: ...


@dataclass(frozen=True)
class LossHead:
    """Loss, statistics and finiteness of one micro-batch.

    Returns `(loss, 0, {"sums": ..., "non_finite": ...})`: the loss is a scalar SUM with gradient, the token count is 0
    since Megatron must not divide by it, `sums` are float64 scalars that add up over micro-batches, and `non_finite`
    [T] marks trainable rows with a NaN or infinite value in any of their arrays. Nothing is raised for it here: other
    ranks are in the middle of their schedule.
    """

    spec: LossSpec
    vocabulary: Vocabulary
    with_entropy: bool = True
    """Compute the entropy for the metrics; it is computed anyway when it has a coefficient."""

    def __call__(self, microbatch: MicroBatch, logits: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
        log_probs, entropy = _log_probs(
            microbatch,
            logits,
            self.vocabulary,
            with_entropy=self.with_entropy or bool(self.spec.entropy_coef),
            entropy_requires_grad=bool(self.spec.entropy_coef),
        )
        if microbatch.weights is None:
            raise ValueError("SequenceBatch.weights is not set: a loss is a weighted sum (algorithms.token_weights)")
        loss, flags = policy_loss(
            log_probs,
            self.spec,
            old_log_probs=microbatch.old_log_probs,
            advantages=microbatch.advantages,
            weights=microbatch.weights,
            reference_log_probs=microbatch.reference_log_probs if self.spec.kl_coef else None,
            entropy=entropy if self.spec.entropy_coef else None,
        )
        sums = token_statistics(
            log_probs.detach(),
            microbatch.trainable,
            old_log_probs=microbatch.old_log_probs,
            flags=flags,
            entropy=None if entropy is None else entropy.detach(),
            reference_log_probs=microbatch.reference_log_probs,
            behaviour_log_probs=microbatch.behaviour_log_probs,
        )
        report = {"sums": {"loss": loss.detach(), **sums}, "non_finite": _non_finite(microbatch, log_probs.detach())}
        return loss, torch.zeros((), dtype=torch.int, device=loss.device), report


@dataclass(frozen=True)
class LogProbHead:
    """`(log_probs [T], entropy [T] or None)` of one micro-batch, float32."""

    vocabulary: Vocabulary
    with_entropy: bool

    def __call__(
        self, microbatch: MicroBatch, logits: Tensor, non_loss_data: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        return _log_probs(microbatch, logits, self.vocabulary, with_entropy=self.with_entropy)


def run_schedule(
    chunks: Sequence[torch.nn.Module], microbatches: Sequence[MicroBatch], head: Head, *, forward_only: bool
) -> list[Any]:
    """All micro-batches through all pipeline stages, backward too unless `forward_only`. Collective.

    Args:
        chunks: this rank's model chunks (data-parallel wrappers when gradients are wanted).
        microbatches: of this data-parallel rank, the same objects on all its model-parallel ranks.
        head: `LossHead`, or `LogProbHead` with `forward_only`.

    Returns:
        The head's report of every micro-batch, in order, on the last pipeline stage; an empty list on the others.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    iterators = [iter(microbatches) for _ in chunks]  # every virtual stage goes through all of them
    reports: list[Any] = get_forward_backward_func()(
        forward_step_func=partial(_forward_step, head),
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


def _forward_step(head: Head, microbatches: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[Tensor, Any]:
    microbatch = next(microbatches)
    output = model(microbatch.tokens, microbatch.position_ids, None, packed_seq_params=microbatch.packed_seq_params)
    return output, partial(head, microbatch)


def _log_probs(
    microbatch: MicroBatch, logits: Tensor, vocabulary: Vocabulary, **options: bool
) -> tuple[Tensor, Tensor | None]:
    """fp32 statistics whatever the logits' format. The model returns [1, T, V / TP]: all rows, also with sequence
    parallelism, since its output layer gathers them."""
    return vocab_parallel_logprob(
        logits.squeeze(0),
        microbatch.targets,
        group=vocabulary.group,
        temperature=microbatch.temperature,
        vocab_size=vocabulary.size,
        **options,
    )


def _non_finite(microbatch: MicroBatch, log_probs: Tensor) -> Tensor:
    read = (
        microbatch.weights,
        microbatch.advantages,
        microbatch.old_log_probs,
        microbatch.reference_log_probs,
        microbatch.behaviour_log_probs,
    )
    finite = torch.isfinite(log_probs)
    for values in read:
        if values is not None:
            finite = finite & torch.isfinite(values)
    return microbatch.trainable & ~finite
