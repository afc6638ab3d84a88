"""Bytes of accelerator memory that a loss moves per token and vocabulary column, counted from source; nothing is timed.

Each entry is a pass over the logits, forward and backward together, logits given in bf16 unless said otherwise. What is
one number a token or less (statistics, log-probs, advantages) is left out: 16 bytes a token travel between ranks, some
hundred bytes a token are read by the token loss, against 6 bytes times the columns.
"""

from __future__ import annotations

OURS: dict[str, dict[str, int]] = {
    "vocab_parallel_logprob": {
        "statistics read the logits": 2,
        "gradient reads them": 2,
        "gradient is written": 2,
    },
    "linear_policy_loss (logits made in fp32, one chunk)": {
        "product writes the logits": 4,
        "statistics read them": 4,
        "gradient reads them": 4,
        "gradient is written over them, in bf16": 2,
        "product for the hidden states reads it": 2,
        "product for the weight reads it": 2,
    },
    "linear_logprob (logits stay on the chip)": {},
}

PEERS: dict[str, tuple[str, str]] = {
    "Liger GRPO loss, per token": ("6", "no tensor parallelism"),
    "Liger GRPO loss, per sequence": ("8", "no tensor parallelism"),
    "Transformer Engine parallel_cross_entropy": ("14 or 22", "no entropy; 22 when its gradient is scaled"),
    "Liger vocab-parallel cross-entropy": ("22", "no entropy"),
    "Megatron-Core fused cross-entropy": ("32", "no entropy; its elementwise passes taken as fused"),
    "slime, verl (Megatron back end)": ("about 60", "eager passes, with entropy"),
}
"""Forward and backward, from their source in August 2026 (verl: January)."""


def table() -> str:
    """Ours with its parts, then the others."""
    lines = ["bytes per token and column, forward and backward"]
    for name, parts in OURS.items():
        lines.append(f"{sum(parts.values()):>9}  {name}")
        lines += [f"{'':9}    {count} {what}" for what, count in parts.items()]
    return "\n".join(lines + [f"{count:>9}  {name} ({remark})" for name, (count, remark) in PEERS.items()])
