"""The pass over chunks with log-probs by Transformer Engine's parallel cross entropy instead of kernels of our own.

It has no entropy and no notion of padding or temperature: padding columns get a number whose exponential is 0, rows are
scaled before and their gradient after. All ranks of its group must hold equally many columns, so padding takes part in
the products.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .chunks import Piece
from .linear_pass import LinearPass
from .matmul import make_logits
from .token_loss import PolicyLossOutput

PADDING = -1e30
"""Not -inf: it would be the maximum of a rank that holds padding alone, and -inf less -inf makes all sums NaN."""


class TePass(LinearPass):
    """One chunk after the other: its gather cannot be awaited later."""

    def add(self, piece: Piece) -> None:
        """A chunk that fits into memory as a whole."""
        where = slice(*piece)
        leaf, nll, hidden = self._nll(where)
        log_probs = -nll.detach()
        self._backward(where, leaf, nll, hidden, self._evaluate(where, log_probs, log_probs), slice(None))

    def add_long(self, pieces: list[Piece]) -> None:
        """A sequence of several pieces: log-probs of all, then the objective, then each one's logits again."""
        log_probs = torch.cat([-self._nll(slice(*piece))[1].detach() for piece in pieces])
        first = pieces[0][0]
        found = self._evaluate(slice(first, pieces[-1][1]), log_probs, log_probs)
        for piece in pieces:
            where = slice(*piece)
            self._backward(where, *self._nll(where), found, slice(piece[0] - first, piece[1] - first))

    def _nll(self, piece: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Logits [k, W], a leaf; the negative log-probs [k] made of them; the hidden states [k, H]."""
        from transformer_engine.pytorch.cross_entropy import parallel_cross_entropy

        live = self._live
        hidden = self._hidden.index_select(0, live.index[piece])
        leaf = make_logits(hidden, live.weight)
        if live.inverse_temperature is not None:
            leaf *= live.inverse_temperature[piece]
        leaf[:, live.shard.valid :] = PADDING
        group = live.shard.group if live.shard.size > 1 else None
        target = live.target[piece] + live.shard.start
        if target.numel() == 0:  # a chunk of masked rows, on all tensor-parallel ranks alike: no kernel to launch
            return leaf, self.log_probs.new_zeros(0), hidden
        with torch.enable_grad():
            leaf.requires_grad_(self._needs_gradient)
            nll = parallel_cross_entropy(leaf[None], target[None], 0.0, False, group)[0]
        return leaf, nll, hidden

    def _backward(
        self, piece: slice, leaf: Tensor, nll: Tensor, hidden: Tensor, found: PolicyLossOutput, part: slice
    ) -> None:
        acting = self._acting(found, part)
        if acting.numel() == 0:
            return
        (d,) = torch.autograd.grad(nll, leaf, -found.d_log_probs[part])
        if self._live.inverse_temperature is not None:
            d = d * self._live.inverse_temperature[piece]
        self._accumulate(piece, hidden, d.to(hidden.dtype) if d.is_cuda else d, acting)
