"""From logits to tokens and their log-probs, for a whole batch at once; no request, no cache, no state here."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from .request import LogProbs, Tokens

_GOLDEN, _MIX_1, _MIX_2 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True)
class SamplingBatch:
    """Per-row settings, all [B]: see `Sampling`; `seeds` uint64, `positions` int64 = index of the token being drawn."""

    temperature: NDArray[np.float32]
    top_p: NDArray[np.float32]
    top_k: NDArray[np.int64]
    min_p: NDArray[np.float32]
    seeds: NDArray[np.uint64]
    positions: NDArray[np.int64]


def mix(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014): uint64 [B] -> uint64 [B], a bijection."""
    words = (words ^ (words >> np.uint64(30))) * _MIX_1
    words = (words ^ (words >> np.uint64(27))) * _MIX_2
    return words ^ (words >> np.uint64(31))


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Numbers in [0, 1), float64 [B], that depend on (seed, position) alone: results cannot depend on scheduling.

    52 bits, so that u * total stays below total in float64.
    """
    counters = positions.astype(np.uint64) + np.uint64(1)
    words = mix(mix(seeds + _GOLDEN) + counters * _GOLDEN)
    return (words >> np.uint64(12)).astype(np.float64) * 2.0**-52


def derive_seed(seed: int, index: int) -> int:
    """Seed, of 64 bits like the given one, of the `index`-th of n samples of one request; the 0-th is the request's."""
    if index == 0:
        return seed
    return int(mix(np.array([seed], np.uint64) + np.array([index], np.uint64) * _GOLDEN)[0])


def sample(logits: torch.Tensor, rows: SamplingBatch) -> tuple[Tokens, LogProbs]:
    """Draw one token per row by inverting the cumulative distribution.

    Args:
        logits: [B, V], any floating type.
        rows: settings of the B rows.

    Returns:
        tokens int64 [B] and their log_softmax(logits / temperature) float32 [B] over the whole vocabulary: top_p, top_k
        and min_p change what is drawn, not the log-prob. Greedy rows use temperature 1. A row with a non-finite logit
        has a non-finite log-prob.
    """
    logits = logits.float()
    greedy = rows.temperature == 0.0
    temperature = np.where(greedy, np.float32(1.0), rows.temperature)
    if (temperature != 1.0).any():
        logits = logits / torch.from_numpy(temperature)[:, None]
    log_probs = torch.log_softmax(logits, dim=-1)
    if greedy.all():
        tokens = log_probs.argmax(dim=-1)
    else:
        tokens = _invert(_filtered(log_probs.exp(), rows), uniforms(rows.seeds, rows.positions))
        if greedy.any():
            tokens = torch.where(torch.from_numpy(greedy), log_probs.argmax(dim=-1), tokens)
    chosen = log_probs.gather(1, tokens[:, None])[:, 0]
    return tokens.numpy(), chosen.numpy()


def _invert(probs: torch.Tensor, draws: NDArray[np.float64]) -> torch.Tensor:
    """First index whose cumulative weight exceeds u * total. Sums in float64: 1e5 float32 terms would lose the tail."""
    cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
    thresholds = cumulative[:, -1:] * torch.from_numpy(draws)[:, None]
    tokens = torch.searchsorted(cumulative, thresholds, right=True)[:, 0]
    return tokens.clamp_(max=probs.shape[-1] - 1)  # only a row of NaN gets past the end


def _filtered(probs: torch.Tensor, rows: SamplingBatch) -> torch.Tensor:
    """Zero what top_k, top_p and min_p leave out (top_p counts the unfiltered mass before a token, as SGLang does)."""
    vocab_size = probs.shape[-1]
    wanted = np.flatnonzero((rows.top_p < 1.0) | (rows.top_k < vocab_size) | (rows.min_p > 0.0))
    if len(wanted) == 0:
        return probs
    index = torch.from_numpy(wanted)
    some = probs[index]
    ordered, order = torch.sort(some, dim=-1, descending=True, stable=True)
    before = ordered.cumsum(dim=-1) - ordered
    keep = torch.arange(vocab_size) < torch.from_numpy(rows.top_k[wanted])[:, None]
    keep &= before <= torch.from_numpy(rows.top_p[wanted])[:, None]
    keep &= ordered >= ordered[:, :1] * torch.from_numpy(rows.min_p[wanted])[:, None]
    filtered = probs.clone()
    filtered[index] = torch.where(torch.zeros_like(keep).scatter_(1, order, keep), some, 0.0)
    return filtered
