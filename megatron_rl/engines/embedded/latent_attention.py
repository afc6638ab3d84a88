"""Queries, keys and values of multi-head latent attention (DeepSeek-V3) for all heads, as `forward` wants them.

The cache holds whole keys and values, not the latent they are made of: they are as simple to keep as any others, and
models that are served here are small. Values have fewer features than keys, and are padded with zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

Rotate = Callable[[torch.Tensor], torch.Tensor]


def project_latent(
    attention: Any, hidden: torch.Tensor, rotate: Rotate
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """hidden [B, S, hidden] -> three of [B, H, S, D], D = features of a key, with and without rotation."""
    nope, turned, heads = attention.qk_nope_head_dim, attention.qk_rope_head_dim, attention.num_heads
    interleaved = attention.config.rope_interleave
    down = hidden if attention.q_a_proj is None else attention.q_a_layernorm(attention.q_a_proj(hidden))
    up = attention.q_proj if attention.q_a_proj is None else attention.q_b_proj
    queries = up(down).unflatten(-1, (heads, nope + turned)).transpose(1, 2)
    latent, shared = attention.kv_a_proj_with_mqa(hidden).split((attention.kv_lora_rank, turned), dim=-1)
    pairs = attention.kv_b_proj(attention.kv_a_layernorm(latent)).unflatten(-1, (heads, -1)).transpose(1, 2)
    keys, values = pairs.split((nope, attention.v_head_dim), dim=-1)
    shared = rotate(_halves(shared[:, None], interleaved)).expand(-1, heads, -1, -1)
    plain, rotated = queries.split((nope, turned), dim=-1)
    queries = torch.cat((plain, rotate(_halves(rotated, interleaved))), dim=-1)
    # Attention divides by the root of D; longer contexts of yarn want another scale.
    queries = queries * (attention.scaling * (nope + turned) ** 0.5)
    return queries, torch.cat((keys, shared), dim=-1), F.pad(values, (0, nope + turned - attention.v_head_dim))


def without_padding(attended: torch.Tensor, heads: int, features: int) -> torch.Tensor:
    """[B, S, H * D] -> [B, S, H * features]: the values without the zeros behind them."""
    return attended.unflatten(-1, (heads, -1))[..., :features].flatten(2)


def _halves(states: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Coordinates that are rotated together stand half a head apart, not side by side."""
    return torch.cat((states[..., 0::2], states[..., 1::2]), dim=-1) if interleaved else states
