"""Corrects faults of Megatron-Core 0.16 to 0.19 that show, on any device, where Transformer Engine is absent.

Megatron then asks for classes and functions of Transformer Engine by names that are not bound.
"""

from __future__ import annotations


def apply_to_experts() -> None:
    """Install the corrections that a model with experts needs; a second call changes nothing.

    transformer/moe/moe_utils.py imports `te_general_gemm` within a `try` and later compares it with None.
    """
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def apply_to_latent_attention() -> None:
    """Install the correction that multi-head latent attention needs; a second call changes nothing.

    transformer/multi_latent_attention.py knows one layer that every rank holds as a whole, Transformer Engine's; the
    one it takes in its absence splits the features that all heads share, and loses gradients of theirs.
    """
    from megatron.core.transformer import multi_latent_attention

    from megatron_rl.policy.latent_attention import DuplicatedLinear

    if not isinstance(multi_latent_attention.TELinear, type):
        multi_latent_attention.TELinear = DuplicatedLinear
