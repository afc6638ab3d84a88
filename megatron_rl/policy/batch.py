"""The sequences that one data-parallel rank trains on, as ragged numpy arrays; no torch and no policy of packing here.

All per-token arrays lie end to end and are aligned WITH `tokens`: `log_probs[t]` is the log-probability of `tokens[t]`
given the tokens before it. The first token of a sequence has no predictor, so it can never be trainable. The shift to
the predicting position happens in one place only, `packing.pack`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

TOKEN_FIELDS = ("advantages", "weights", "behaviour_log_probs", "old_log_probs", "reference_log_probs")
"""The optional per-token float32 arrays of a `SequenceBatch`."""
ROUTE_FIELDS = ("routes", "old_routes")
"""The optional choices of experts of a `SequenceBatch`."""


class Routes(Protocol):
    """Which experts each token of a batch was given to, wherever that is kept; read only for what a rank computes.

    A layer is the index of a MoE layer among the model's MoE layers, from 0. A row is the position of the token that
    was READ: the last token of a sequence was not, and has none.
    """

    def rows(self, sequence: int, layers: Sequence[int], begin: int, end: int) -> np.ndarray:
        """int16 [layers, end - begin, top_k], rows `begin` to `end` of a sequence; all -1 where not known."""
        ...

    def select(self, indices: Iterable[int]) -> Routes:
        """Those of the sequences at `indices`, in that order."""
        ...


@dataclass(frozen=True)
class SequenceBatch:
    """S sequences of T tokens in all, of one data-parallel rank.

    Attributes:
        tokens: int64 [T], prompt and response of every sequence, end to end.
        offsets: int64 [S + 1], sequence `i` is `tokens[offsets[i]:offsets[i + 1]]`; never empty.
        mask: bool [T], True where the token is trainable; always False on the first token of a sequence.
        temperature: float32 [S], the sampling temperature of each sequence, > 0.
        sample_ids: S strings, unique, used in error messages and as cache keys.
        advantages: float32 [T] or None.
        weights: float32 [T] or None; the loss normaliser, counted over the whole batch of one optimizer step
            (`algorithms.token_weights`), so that losses are plain weighted sums.
        behaviour_log_probs: float32 [T] or None, of the engine that sampled the token.
        old_log_probs: float32 [T] or None, of this policy before the first update on this batch.
        reference_log_probs: float32 [T] or None, of the frozen reference policy.
        routes: which experts the engine that sampled used, or None.
        old_routes: which experts this policy chose before the first update on this batch, or None.
        routing_mismatch: float32 [S] or None, share of (token, layer) of each sequence with other experts in the
            engine than this policy would have chosen then; NaN where nothing was to be compared.

    Whatever stands at a masked position of the optional arrays (NaN included) is never read.

    Raises:
        ValueError: when a shape, a dtype or one of the rules above is violated; the message names the field.

    >>> batch = SequenceBatch.from_sequences([[5, 6, 7], [8, 9]], masks=[[0, 1, 1], [0, 1]], sample_ids=["a", "b"])
    >>> batch.lengths.tolist(), batch.trainable_counts.tolist()
    ([3, 2], [2, 1])
    >>> batch.select([1]).tokens.tolist()
    [8, 9]
    """

    tokens: np.ndarray
    offsets: np.ndarray
    mask: np.ndarray
    temperature: np.ndarray
    sample_ids: tuple[str, ...]
    advantages: np.ndarray | None = None
    weights: np.ndarray | None = None
    behaviour_log_probs: np.ndarray | None = None
    old_log_probs: np.ndarray | None = None
    reference_log_probs: np.ndarray | None = None
    routes: Routes | None = None
    old_routes: Routes | None = None
    routing_mismatch: np.ndarray | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "sample_ids", tuple(self.sample_ids))
        _check(self)

    @classmethod
    def from_sequences(
        cls,
        sequences: Sequence[Sequence[int] | np.ndarray],
        masks: Sequence[Sequence[int] | np.ndarray],
        sample_ids: Sequence[str],
        temperature: float | Sequence[float] | np.ndarray = 1.0,
        **arrays: Any,
    ) -> SequenceBatch:
        """Build from one list of token ids and one 0/1 mask per sequence; `arrays` are the optional fields as such."""
        lengths = np.array([len(sequence) for sequence in sequences], dtype=np.int64)
        return cls(
            tokens=_concatenate(sequences, np.int64),
            offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            mask=_concatenate(masks, np.bool_),
            temperature=np.broadcast_to(np.asarray(temperature, dtype=np.float32), lengths.shape).copy(),
            sample_ids=tuple(sample_ids),
            **arrays,
        )

    def __len__(self) -> int:
        """Number of sequences, S."""
        return len(self.sample_ids)

    @property
    def num_tokens(self) -> int:
        """T, prompt and response tokens of all sequences."""
        return int(self.tokens.size)

    @property
    def lengths(self) -> np.ndarray:
        """int64 [S], tokens of every sequence."""
        return np.diff(self.offsets)

    @property
    def trainable_counts(self) -> np.ndarray:
        """int64 [S], trainable tokens of every sequence (`N_i`)."""
        if not len(self):
            return np.zeros(0, dtype=np.int64)
        return np.add.reduceat(self.mask.astype(np.int64), self.offsets[:-1])

    def with_arrays(self, **arrays: np.ndarray | Routes | None) -> SequenceBatch:
        """A copy with some of the optional fields replaced, e.g. `old_log_probs`."""
        return replace(self, **arrays)  # type: ignore[arg-type]

    def select(self, indices: Iterable[int]) -> SequenceBatch:
        """The sequences at `indices`, in that order; all per-token arrays move with them."""
        chosen = np.asarray(list(indices), dtype=np.int64)
        rows = ragged_rows(self.offsets[chosen], self.lengths[chosen])
        present = {name: value for name in TOKEN_FIELDS + ROUTE_FIELDS if (value := getattr(self, name)) is not None}
        moved: dict[str, Any] = {
            name: value.select(chosen) if name in ROUTE_FIELDS else value[rows] for name, value in present.items()
        }
        return SequenceBatch(
            tokens=self.tokens[rows],
            offsets=np.concatenate([[0], np.cumsum(self.lengths[chosen])]).astype(np.int64),
            mask=self.mask[rows],
            temperature=self.temperature[chosen],
            sample_ids=tuple(self.sample_ids[i] for i in chosen),
            routing_mismatch=None if self.routing_mismatch is None else self.routing_mismatch[chosen],
            **moved,
        )


def ragged_rows(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Indices of the concatenation of `range(start, start + length)`; all int64.

    >>> ragged_rows(np.array([7, 2]), np.array([2, 3])).tolist()
    [7, 8, 2, 3, 4]
    """
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()), dtype=np.int64)


def _concatenate(parts: Sequence[Sequence[int] | np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([np.asarray(part, dtype=dtype) for part in parts]) if len(parts) else np.zeros(0, dtype=dtype)


def _check(batch: SequenceBatch) -> None:
    """Raise ValueError unless every rule of the class docstring holds."""
    expected = {"tokens": np.int64, "offsets": np.int64, "mask": np.bool_, "temperature": np.float32}
    expected |= {name: np.float32 for name in TOKEN_FIELDS if getattr(batch, name) is not None}
    num_tokens, num_sequences = np.size(batch.tokens), len(batch.sample_ids)
    if batch.routing_mismatch is not None:
        expected["routing_mismatch"] = np.float32
    sizes = {"offsets": num_sequences + 1, "temperature": num_sequences, "routing_mismatch": num_sequences}
    for name, dtype in expected.items():
        array, size = getattr(batch, name), sizes.get(name, num_tokens)
        if not isinstance(array, np.ndarray) or array.dtype != dtype or array.shape != (size,):
            found = f"{array.dtype} {list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__
            raise ValueError(f"SequenceBatch.{name} must be {np.dtype(dtype)} [{size}], got {found}")
    if batch.offsets[0] != 0 or batch.offsets[-1] != num_tokens or (np.diff(batch.offsets) < 1).any():
        raise ValueError("SequenceBatch.offsets must rise from 0 to the number of tokens, at least 1 a sequence")
    if len(set(batch.sample_ids)) != num_sequences:
        raise ValueError("SequenceBatch.sample_ids must be unique")
    bad = np.flatnonzero(batch.mask[batch.offsets[:-1]])
    if bad.size:
        raise ValueError(
            f"SequenceBatch.mask is True on the first token of {batch.sample_ids[bad[0]]}: nothing predicts it, so it "
            "cannot be trained on"
        )
    if not (np.isfinite(batch.temperature) & (batch.temperature > 0)).all():
        raise ValueError("SequenceBatch.temperature must be finite and above 0")
