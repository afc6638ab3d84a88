"""One pass over the chunks of a batch: logits, statistics, objective, gradients; cutting and checks are elsewhere.

Over several tensor-parallel ranks a chunk is completed only when the next one's product and statistics are on their
way, so that its all-gather has something to hide behind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from . import backend
from .chunks import Piece
from .matmul import add_weight_gradient, gradient_memory, hidden_gradient, make_logits
from .shard import Shard
from .token_loss import PolicyLossOutput
from .vocab_rows import Rows, compute_dtype
from .vocab_statistics import Merged

Objective = Callable[[Tensor, Tensor, Tensor | None], PolicyLossOutput]
"""Of the live rows' numbers [n], log-probs [n] and entropies [n]."""

ALIGNMENT = 16
"""On CUDA the padding up to a multiple of this takes part in the products, so that rows of logits start aligned."""


@dataclass(frozen=True)
class LiveRows:
    """The n rows that are not masked, and the output layer that they meet."""

    weight: Tensor
    """[W, H]."""
    shard: Shard
    index: Tensor
    """int64 [n] numbers of the live rows, ascending."""
    target: Tensor
    """int64 [n], relative to this rank's columns."""
    inverse_temperature: Tensor | None
    """[n, 1]."""
    num_rows: int
    """T."""
    sequence_parallel: bool

    def all_hidden(self, hidden: Tensor) -> Tensor:
        """[T, H], gathered when each rank has a part of the rows."""
        if not self.sequence_parallel:
            return hidden
        whole = hidden.new_empty(self.num_rows, hidden.shape[1])
        dist.all_gather_into_tensor(whole, hidden.contiguous(), group=self.shard.group)
        return whole

    @property
    def used_weight(self) -> Tensor:
        """The rows of the weight that belong to the vocabulary (and its padding up to ALIGNMENT on CUDA)."""
        valid = self.shard.valid
        return self.weight[: -(-valid // ALIGNMENT) * ALIGNMENT if self.weight.is_cuda else valid]

    def rows(self, logits: Tensor, piece: slice) -> Rows:
        """`logits` [k, *] of the live rows `piece`, for the row kernels."""
        return Rows(logits, self.target[piece], None, self._inverse(piece), self.shard.valid)

    def statistics(self, hidden: Tensor, piece: slice, with_entropy: bool) -> Tensor:
        """Statistics [4, k] of the live rows `piece` of all hidden rows, without logits."""
        return backend.linear_statistics(
            hidden,
            self.weight,
            self.target[piece],
            self.index[piece],
            self._inverse(piece),
            self.shard.valid,
            with_entropy,
        )

    def _inverse(self, piece: slice) -> Tensor | None:
        return None if self.inverse_temperature is None else self.inverse_temperature[piece]


@dataclass(frozen=True)
class _Begun:
    """A piece whose statistics are being gathered."""

    piece: slice
    hidden: Tensor
    rows: Rows
    maximum: Tensor
    kept: Tensor | None
    gathered: Callable[[], Tensor]


class LinearPass:
    """Results accumulate in `loss`, `log_probs`, `entropy`, `flags`, and, after `finish`, `gradients`."""

    def __init__(
        self,
        live: LiveRows,
        hidden: Tensor,
        objective: Objective,
        with_entropy: bool,
        needs_gradient: tuple[bool, bool],
        main_grad: Tensor | None,
    ) -> None:
        self._live, self._objective, self._with_entropy = live, objective, with_entropy
        self._hidden = live.all_hidden(hidden.detach())
        wide = compute_dtype(hidden)
        self.loss = hidden.new_zeros((), dtype=torch.float64)
        self.log_probs = hidden.new_zeros(live.num_rows, dtype=wide)
        self.entropy = torch.zeros_like(self.log_probs) if with_entropy else None
        self.flags = torch.zeros_like(self.log_probs, dtype=torch.int8)
        self._d_hidden = torch.zeros_like(self._hidden) if needs_gradient[0] else None
        self._d_weight = None
        if needs_gradient[1]:
            self._d_weight = torch.zeros_like(live.weight, dtype=wide) if main_grad is None else main_grad
        self._begun: _Begun | None = None

    def add(self, piece: Piece) -> None:
        """A chunk that fits into memory as a whole."""
        where = slice(*piece)
        hidden, rows = self._logits(where)
        stats, kept = backend.vocab_statistics(rows, self._with_entropy, self._needs_gradient, in_place=True)
        begun = _Begun(where, hidden, rows, stats[0], kept, self._live.shard.gather(stats))
        self._complete()
        self._begun = begun
        if self._live.shard.size == 1:
            self._complete()

    def add_long(self, pieces: list[Piece]) -> None:
        """A sequence of several pieces: statistics of all, then the objective, then each one's logits again."""
        self._complete()
        parts = [self._live.statistics(self._hidden, slice(*piece), self._with_entropy) for piece in pieces]
        stats = torch.cat(parts, 1)
        merged = backend.combine(self._live.shard.gather(stats)(), self._live.shard.rank)
        first = pieces[0][0]
        found = self._evaluate(slice(first, pieces[-1][1]), merged.log_prob, merged.entropy)
        for piece in pieces:
            part = slice(piece[0] - first, piece[1] - first)
            acting = self._acting(found, part)
            if acting.numel():
                hidden, rows = self._logits(slice(*piece))
                self._backpropagate(slice(*piece), hidden, rows, stats[0], None, merged, found, part, acting)

    def finish(self) -> None:
        """Complete the last chunk and start the sum of hidden gradients over ranks."""
        self._complete()
        live, d_hidden, work = self._live, self._d_hidden, None
        if d_hidden is not None and live.sequence_parallel:
            whole, d_hidden = d_hidden, d_hidden.new_empty(live.num_rows // live.shard.size, d_hidden.shape[1])
            work = dist.reduce_scatter_tensor(d_hidden, whole, group=live.shard.group, async_op=True)
        elif d_hidden is not None and live.shard.size > 1:
            work = dist.all_reduce(d_hidden, group=live.shard.group, async_op=True)
        d_weight = self._d_weight

        def gradients() -> tuple[Tensor | None, Tensor | None]:
            if work is not None:
                work.wait()
            return d_hidden, d_weight

        self.gradients = gradients

    @property
    def _needs_gradient(self) -> bool:
        return self._d_hidden is not None or self._d_weight is not None

    def _logits(self, piece: slice) -> tuple[Tensor, Rows]:
        hidden = self._hidden.index_select(0, self._live.index[piece])
        return hidden, self._live.rows(make_logits(hidden, self._live.used_weight), piece)

    def _complete(self) -> None:
        """The second half of the chunk that was begun, if there is one."""
        begun, self._begun = self._begun, None
        if begun is None:
            return
        merged = backend.combine(begun.gathered(), self._live.shard.rank)
        found = self._evaluate(begun.piece, merged.log_prob, merged.entropy)
        part = slice(None)
        acting = self._acting(found, part)
        if acting.numel():
            self._backpropagate(
                begun.piece, begun.hidden, begun.rows, begun.maximum, begun.kept, merged, found, part, acting
            )

    def _evaluate(self, piece: slice, log_probs: Tensor, entropy: Tensor) -> PolicyLossOutput:
        index = self._live.index[piece]
        found = self._objective(index, log_probs, entropy if self._with_entropy else None)
        self.loss += found.loss
        self.log_probs[index] = log_probs
        self.flags[index] = found.flags
        if self.entropy is not None:
            self.entropy[index] = entropy
        return found

    def _acting(self, found: PolicyLossOutput, part: slice) -> Tensor:
        """int64 [<= k], those of the k rows `part` that have a gradient; none when nobody wants one."""
        if not self._needs_gradient:
            return found.flags.new_empty(0, dtype=torch.int64)
        acting = found.d_log_probs[part] != 0
        if found.d_entropy is not None:
            acting |= found.d_entropy[part] != 0
        return acting.nonzero().squeeze(1)

    def _backpropagate(
        self,
        piece: slice,
        hidden: Tensor,
        rows: Rows,
        maximum: Tensor,
        kept: Tensor | None,
        merged: Merged,
        found: PolicyLossOutput,
        part: slice,
        acting: Tensor,
    ) -> None:
        """Gradients of the live rows `piece`, which are `part` of the statistics; logits become their gradient."""
        d_entropy = None if found.d_entropy is None else found.d_entropy[part]
        d = backend.logits_gradient(
            rows,
            maximum=maximum[part],
            log_norm=merged.log_norm[part],
            kept=kept,
            grad=found.d_log_probs[part],
            entropy=merged.entropy[part],
            entropy_grad=d_entropy,
            out=gradient_memory(rows.logits, hidden.dtype),
        )
        self._accumulate(piece, hidden, d, acting)

    def _accumulate(self, piece: slice, hidden: Tensor, d: Tensor, acting: Tensor) -> None:
        """The products with d [k, *], the gradient of the logits of `piece`, which is 0 but in the `acting` rows."""
        index = self._live.index[piece]
        if 2 * acting.numel() <= d.shape[0]:  # worth a copy: products over the other rows would add zeros
            d, hidden, index = d[acting], hidden[acting], index[acting]
        weight = self._live.weight[: d.shape[1]]
        if self._d_hidden is not None:
            self._d_hidden[index] = hidden_gradient(d, weight)
        if self._d_weight is not None:
            add_weight_gradient(self._d_weight[: d.shape[1]], d, hidden)
