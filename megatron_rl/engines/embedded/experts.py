"""A layer of experts: which experts a token goes to and what they make of it; and the names its weights have in files.

What is routed and kept where is the decoder's business.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F


def has_experts(mlp: Any) -> bool:
    """Whether an MLP is a mixture of experts."""
    return hasattr(mlp, "experts")


def mix_experts(block: Any, hidden: torch.Tensor, fixed_shapes: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """hidden [B, S, H] -> outputs [B, S, H], and the experts of every token, int64 [B, S, top_k].

    With `fixed_shapes` every expert computes every token, so that no kernel's shape depends on the routing.
    """
    rows = hidden.flatten(0, -2)
    _, weights, experts = block.gate(rows)
    compute = partial(_all_experts, block.experts) if fixed_shapes else block.experts
    mixed = compute(rows, experts, weights).view_as(hidden)
    if hasattr(block, "shared_experts"):  # DeepSeek's and GLM's, which see every token
        mixed = mixed + block.shared_experts(hidden)
    return mixed, experts.view(*hidden.shape[:-1], -1)


def _all_experts(stack: Any, rows: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Sum over experts in the order of their numbers; a token's weight of an expert that is none of its own is 0."""
    dense = weights.new_zeros(len(rows), stack.num_experts).scatter_(1, experts, weights)
    total = torch.zeros_like(rows)
    for expert in range(stack.num_experts):
        gate, up = F.linear(rows, stack.gate_up_proj[expert]).chunk(2, dim=-1)
        outputs = F.linear(stack.act_fn(gate) * up, stack.down_proj[expert])
        total = total + (outputs * dense[:, expert, None]).to(total.dtype)
    return total


def named_views(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters under the names that checkpoints and weight updates give them.

    transformers keeps the experts of a layer in one tensor; what is yielded for each is a part of it, not a copy.
    """
    for name, buffer in model.named_buffers():
        if name.endswith(".e_score_correction_bias"):  # of some routers; checkpoints have it among the weights
            yield name, buffer
    names = _MIXTRAL if model.config.model_type == "mixtral" else _USUAL
    for name, parameter in model.named_parameters():
        layer, found, leaf = name.rpartition(".mlp.experts.")
        if found:
            for expert, weight in enumerate(parameter):
                for part, matrix in _matrices(leaf, weight):
                    yield f"{layer}.{names['block']}.experts.{expert}.{names[part]}.weight", matrix
        else:
            yield name.replace(".mlp.gate.", f".{names['block']}.gate."), parameter


def _matrices(leaf: str, weight: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    if leaf == "gate_up_proj":
        gate, up = weight.chunk(2)
        return [("gate", gate), ("up", up)]
    return [("down", weight)]


_USUAL = {"block": "mlp", "gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
_MIXTRAL = {"block": "block_sparse_moe", "gate": "w1", "up": "w3", "down": "w2"}
