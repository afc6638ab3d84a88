"""One micro-batch as the packed (thd) tensors the model reads, and its per-token outputs back again; no process group.

`pack` is the only place where arrays move from the token they describe to the position that predicts it: a sequence of
L tokens gives L - 1 rows, row r reads token r and predicts token r + 1, and carries the mask, advantage, weight and
log-probs of token r + 1. `unpack` is the inverse. With context parallelism each rank packs its own rows of the same
sequences, see `zigzag`, and `unpack` puts its outputs at their places and 0 at those of other ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from megatron_rl.algorithms.losses import Sequences
from megatron_rl.policy.batch import TOKEN_FIELDS, SequenceBatch, ragged_rows
from megatron_rl.policy.zigzag import zigzag

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams


@dataclass(frozen=True)
class MicroBatch:
    """T packed rows, on one device; with context parallelism those of this rank alone.

    Attributes:
        tokens: int64 [1, T], the input of each row.
        position_ids: int64 [1, T], place of each row in its whole sequence, from 0.
        targets: int64 [T], the token each row predicts, -1 where that token is not trainable.
        cu_seqlens: int32 [n + 1], first row of every packed sequence, padding counted, of all context-parallel ranks
            together; the last sequence may be masked padding as a whole.
        sequence_starts: first of this rank's rows of every packed sequence, as numbers on the host.
        sequences: which row belongs to which packed sequence, and how many trainable rows each whole one has.
        max_seqlen: rows of the longest packed sequence, of all context-parallel ranks together.
        temperature: of every row: one number where all sequences share it, else float32 [T].
        advantages, weights, behaviour_log_probs, old_log_probs, reference_log_probs: float32 [T] or None, exactly 0
            on rows that are not trainable.
        destination: int64 [T] numpy, where each row's output belongs in the batch's token axis, -1 for padding.
        sample_ids: the sequences of this micro-batch, for messages.
        is_shared: other context-parallel ranks have other rows of the same sequences.
    """

    tokens: Tensor
    position_ids: Tensor
    targets: Tensor
    cu_seqlens: Tensor
    sequence_starts: tuple[int, ...]
    sequences: Sequences
    max_seqlen: int
    temperature: float | Tensor
    destination: np.ndarray
    sample_ids: tuple[str, ...]
    is_shared: bool = False
    advantages: Tensor | None = None
    weights: Tensor | None = None
    behaviour_log_probs: Tensor | None = None
    old_log_probs: Tensor | None = None
    reference_log_probs: Tensor | None = None

    @property
    def num_rows(self) -> int:
        """T, padding included."""
        return self.targets.numel()

    @property
    def trainable(self) -> Tensor:
        """bool [T], rows whose target is trained on."""
        return self.targets >= 0

    @cached_property
    def packed_seq_params(self) -> PackedSeqParams:
        """The borders in Megatron's form; one object for all layers, which may keep what they derive from it."""
        from megatron.core.packed_seq_params import PackedSeqParams

        return PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=self.cu_seqlens,
            cu_seqlens_kv=self.cu_seqlens,
            # Transformer Engine asks for them with context parallelism. Not other borders than above: padding ends
            # its sequence, where nothing real attends to it, and kernels that would skip it are fewer and slower.
            cu_seqlens_q_padded=self.cu_seqlens if self.is_shared else None,
            cu_seqlens_kv_padded=self.cu_seqlens if self.is_shared else None,
            max_seqlen_q=self.max_seqlen,
            max_seqlen_kv=self.max_seqlen,
        )


@dataclass(frozen=True)
class RowShare:
    """Which rows of a micro-batch a rank packs, and what they are padded to; see `parallel.sequence_multiple`."""

    sequence_multiple: int = 1
    """Of the rows of every sequence."""
    total_multiple: int = 1
    """Of the rows of all sequences together."""
    context_size: int = 1
    context_rank: int = 0


def pack(
    batch: SequenceBatch,
    indices: Sequence[int],
    share: RowShare = RowShare(),
    device: torch.device | str = "cpu",
) -> MicroBatch:
    """Pack the sequences at `indices` of `batch` end to end, and keep this rank's rows.

    Every sequence ends with the masked rows that its multiple asks for; one more masked sequence pads them all to
    theirs. Without any row (no sequences, or only single tokens) that dummy is the whole micro-batch.
    """
    chosen = np.asarray(indices, dtype=np.int64)
    chosen = chosen[batch.lengths[chosen] > 1]
    borders, predicted = _lay_out(batch, chosen, share)
    trainable = np.zeros(predicted.size, dtype=np.bool_)
    trainable[predicted >= 0] = batch.mask[predicted[predicted >= 0]]
    segments = np.diff(borders)
    sequence = np.repeat(np.arange(segments.size), segments)
    lengths = np.bincount(sequence, weights=trainable, minlength=segments.size).astype(np.float64)
    mine = zigzag(borders, share.context_size, share.context_rank)
    destination, trainable, sequence = predicted[mine], trainable[mine], sequence[mine]

    def move(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(device, non_blocking=True)

    def rows(values: np.ndarray, at: np.ndarray, where: np.ndarray, fill: float) -> Tensor:
        """`values[at]` on the rows `where`, `fill` on the others: what is masked may be inf or NaN and is not read."""
        filled = np.full(at.size, fill, dtype=values.dtype)
        filled[where] = values[at[where]]
        return move(filled)

    arrays: dict[str, Tensor | None] = {}
    for name in TOKEN_FIELDS:
        values = getattr(batch, name)
        arrays[name] = None if values is None else rows(values, destination, trainable, 0)
    temperature = np.append(batch.temperature[chosen], np.float32(1))
    return MicroBatch(
        tokens=rows(batch.tokens, destination - 1, destination > 0, 0)[None],
        position_ids=move(ragged_rows(np.zeros_like(segments), segments)[mine])[None],
        targets=rows(batch.tokens, destination, trainable, -1),
        cu_seqlens=move(borders.astype(np.int32)),
        sequence_starts=tuple((borders[:-1] // share.context_size).tolist()),
        sequences=Sequences(move(sequence), move(lengths)),
        max_seqlen=int(segments.max()),
        temperature=_uniform(temperature[:-1]) or move(temperature[sequence]),
        destination=destination,
        sample_ids=tuple(batch.sample_ids[i] for i in chosen),
        is_shared=share.context_size > 1,
        **arrays,
    )


def _lay_out(batch: SequenceBatch, chosen: np.ndarray, share: RowShare) -> tuple[np.ndarray, np.ndarray]:
    """Borders [n + 1] of the padded sequences, and the token that each of their rows predicts, -1 for padding."""
    lengths = batch.lengths[chosen] - 1
    segments = lengths + -lengths % share.sequence_multiple
    padding = -int(segments.sum()) % share.total_multiple if segments.size else share.total_multiple
    segments = np.append(segments, padding) if padding else segments
    borders = np.append(0, np.cumsum(segments))
    predicted = np.full(borders[-1], -1, dtype=np.int64)
    predicted[ragged_rows(borders[: chosen.size], lengths)] = ragged_rows(batch.offsets[chosen] + 1, lengths)
    return borders, predicted


def _uniform(temperature: np.ndarray) -> float | None:
    """The one value of `temperature`, 1 without any; None when they differ."""
    if temperature.size == 0:
        return 1.0
    return float(temperature[0]) if (temperature == temperature[0]).all() else None


def unpack(outputs: Iterable[tuple[MicroBatch, Tensor]], num_tokens: int) -> np.ndarray:
    """Per-row outputs [T] of each micro-batch back on the batch's token axis.

    Returns float32 [num_tokens] aligned with `SequenceBatch.tokens`, in input order; 0 where no row predicts.
    """
    result = np.zeros(num_tokens, dtype=np.float32)
    for microbatch, values in outputs:
        real = microbatch.destination >= 0
        result[microbatch.destination[real]] = values.detach().float().cpu().numpy()[real]
    return result
