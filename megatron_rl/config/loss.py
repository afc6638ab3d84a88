"""Section `loss:`, how the fused loss is computed. What it computes is section `algorithm:`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from .base import Section


class LossConfig(Section):
    """Memory and implementation of log-probs and loss; results do not depend on it."""

    chunk_tokens: int = Field(4096, ge=1)
    """Tokens whose logits exist at a time, in fp32 (on tensor-parallel ranks: of two chunks). Fewer save memory, but
    below some 2048 the matrix products of a GPU get slower, since every chunk reads the output weight again."""
    logprob_backend: Literal["auto", "te"] = "auto"
    """Log-probs of the loss by this project's own kernels, or by Transformer Engine's parallel cross entropy, which has
    no entropy: neither its bonus nor its metric."""
