"""One micro-batch as the packed (thd) tensors the model reads, and its per-token outputs back again; no process group.

`pack` is the only place where arrays move from the token they describe to the position that predicts it: a sequence of
L tokens gives L - 1 rows, row r reads token r and predicts token r + 1, and carries the mask, advantage, weight and
log-probs of token r + 1. `unpack` is the inverse.
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

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams


@dataclass(frozen=True)
class MicroBatch:
    """T packed rows, on one device.

    Attributes:
        tokens: int64 [1, T], the input of each row.
        position_ids: int64 [1, T], from 0 in every sequence.
        targets: int64 [T], the token each row predicts, -1 where that token is not trainable.
        cu_seqlens: int32 [n + 1], first row of every packed sequence; the last sequence may be the masked padding.
        sequence_starts: the same without the end, as numbers on the host.
        sequences: which row belongs to which packed sequence, and how many trainable rows each one has.
        max_seqlen: rows of the longest packed sequence.
        temperature: of every row: one number where all sequences share it, else float32 [T].
        advantages, weights, behaviour_log_probs, old_log_probs, reference_log_probs: float32 [T] or None, exactly 0
            on rows that are not trainable.
        destination: int64 [T] numpy, where each row's output belongs in the batch's token axis, -1 for padding.
        sample_ids: the sequences of this micro-batch, for messages.
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
            max_seqlen_q=self.max_seqlen,
            max_seqlen_kv=self.max_seqlen,
        )


def pack(
    batch: SequenceBatch,
    indices: Sequence[int],
    pad_multiple: int = 1,
    device: torch.device | str = "cpu",
) -> MicroBatch:
    """Pack the sequences at `indices` of `batch` end to end.

    The rows are padded to a multiple of `pad_multiple` (the tensor-parallel size under sequence parallelism) by one
    trailing masked sequence. Without any row (no sequences, or only single tokens) that dummy is the whole micro-batch.
    """
    chosen = np.asarray(indices, dtype=np.int64)
    rows_per_sequence = batch.lengths[chosen] - 1
    chosen, rows_per_sequence = chosen[rows_per_sequence > 0], rows_per_sequence[rows_per_sequence > 0]
    source = ragged_rows(batch.offsets[chosen], rows_per_sequence)
    num_rows = source.size
    padding = -num_rows % pad_multiple if num_rows else pad_multiple
    segments = np.append(rows_per_sequence, padding) if padding else rows_per_sequence
    trainable = batch.mask[source + 1]
    borders = np.append(0, np.cumsum(segments))
    sequence = np.repeat(np.arange(segments.size), segments)
    lengths = np.bincount(sequence[:num_rows], weights=trainable, minlength=segments.size).astype(np.float64)

    def tensor(values: np.ndarray, fill: float) -> Tensor:
        padded = np.pad(values, (0, padding), constant_values=fill)
        return torch.from_numpy(padded).to(device, non_blocking=True)

    arrays: dict[str, Tensor | None] = {}
    for name in TOKEN_FIELDS:
        values = getattr(batch, name)
        # `where`, not a product with the mask: a masked position may hold inf or NaN.
        arrays[name] = None if values is None else tensor(np.where(trainable, values[source + 1], np.float32(0)), 0)
    return MicroBatch(
        tokens=tensor(batch.tokens[source], 0)[None],
        position_ids=torch.from_numpy(ragged_rows(np.zeros_like(segments), segments)).to(device)[None],
        targets=tensor(np.where(trainable, batch.tokens[source + 1], -1), -1),
        cu_seqlens=torch.from_numpy(borders.astype(np.int32)).to(device),
        sequence_starts=tuple(borders[:-1].tolist()),
        sequences=Sequences(torch.from_numpy(sequence).to(device), torch.from_numpy(lengths).to(device)),
        max_seqlen=int(segments.max()),
        temperature=_uniform(batch.temperature[chosen])
        or tensor(np.repeat(batch.temperature[chosen], rows_per_sequence), 1),
        destination=np.pad(source + 1, (0, padding), constant_values=-1),
        sample_ids=tuple(batch.sample_ids[i] for i in chosen),
        **arrays,
    )


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
