"""Rows of logits to try, and what must come out, in float64 and from the definitions; no tests here."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.kernels.vocab_rows import MOST_NEGATIVE, Rows


def random_rows(
    seed: int = 0,
    *,
    rows: int = 7,
    width: int = 208,
    valid: int = 187,
    dtype: torch.dtype = torch.float32,
    masked: bool = True,
    scaled: bool = True,
    spread: float = 3.0,
) -> Rows:
    """Logits of one slice. Among the targets are the first and last column, block borders and ones owned elsewhere."""
    generator = torch.Generator().manual_seed(seed)
    logits = (spread * torch.randn(rows, width, generator=generator)).to(dtype)
    index = torch.tensor([row for row in range(rows) if row % 3 != 1]) if masked else None
    n = rows if index is None else len(index)
    special = torch.tensor([valid - 1, -1, width, 64, 0, 63, 128, -width, width + 5])
    target = torch.randint(0, valid, (n,), generator=generator)
    target[: len(special)] = special[:n]
    target = target.where((target < valid) | (target >= width), 0)
    inverse = 0.5 + torch.rand(n, 1, generator=generator) if scaled else None
    return Rows(logits, target, index, inverse, valid)


@dataclass(frozen=True)
class Exact:
    """Of every live row, [n] or [n, valid] float64."""

    x: Tensor
    m: Tensor
    s: Tensor
    y: Tensor
    u: Tensor

    @property
    def statistics(self) -> Tensor:
        return torch.stack([self.m, self.s, self.y, self.u])


def exact(rows: Rows) -> Exact:
    """The definitions of `vocab_statistics`, written out."""
    live = rows.logits if rows.index is None else rows.logits[rows.index]
    x = live.double()[:, : rows.valid]
    if rows.inverse_temperature is not None:
        x = x * rows.inverse_temperature.double()
    m = x.amax(1).clamp(min=MOST_NEGATIVE) if rows.valid else torch.full(x.shape[:1], MOST_NEGATIVE).double()
    z = x - m[:, None]
    e = z.exp()
    owned = (rows.target >= 0) & (rows.target < rows.valid)
    y = torch.zeros_like(m)
    y[owned] = x[owned, rows.target[owned]]
    return Exact(x, m, e.sum(1), y, torch.where(e > 0, e * z, 0.0).sum(1))


def exact_gradient(rows: Rows, log_norm: Tensor, entropy: Tensor, grad: Tensor | None, entropy_grad: Tensor | None):
    """d (Σ grad log_prob + entropy_grad H) / d logits [T, W] float64, from p = exp(x - m - log_norm)."""
    found = exact(rows)
    log_p = found.x - (found.m + log_norm.double())[:, None]
    p = log_p.exp()
    inverse = 1.0 if rows.inverse_temperature is None else rows.inverse_temperature.double()
    live = torch.zeros_like(p)
    if grad is not None:
        onehot = torch.zeros_like(p)
        owned = (rows.target >= 0) & (rows.target < rows.valid)
        onehot[owned, rows.target[owned]] = 1.0
        live += grad.double()[:, None] * (onehot - p)
    if entropy_grad is not None:
        plogp = torch.where(p > 0, p * (log_p + entropy.double()[:, None]), 0.0)
        live -= entropy_grad.double()[:, None] * plogp
    out = torch.zeros(rows.logits.shape, dtype=torch.float64)
    where = torch.arange(len(out)) if rows.index is None else rows.index
    out[where, : rows.valid] = live * inverse
    return out
