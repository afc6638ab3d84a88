"""Which prompts fit the model's prompt budget: measured once, before a run; never truncates a prompt."""

from __future__ import annotations

from typing import Protocol

from .dataset import PromptDataset
from .records import DataError, PromptRecord


class Encoder(Protocol):
    """The one method of `PromptTokenizer` that is needed here."""

    def encode(self, record: PromptRecord) -> list[int]:
        """Token ids of the prompt, chat template included."""


def fit_to_length(
    dataset: PromptDataset, tokenizer: Encoder, max_prompt_tokens: int, drop: bool
) -> tuple[PromptDataset, int]:
    """The records whose prompt has at most `max_prompt_tokens` tokens, and the number of those left out.

    Without `drop`, a longer prompt is a `DataError` that names the longest; so is a file in which all are too long.
    """
    lengths = [len(tokenizer.encode(record)) for record in dataset]
    kept = [position for position, length in enumerate(lengths) if length <= max_prompt_tokens]
    dropped = len(lengths) - len(kept)
    if not dropped:
        return dataset, 0
    if drop and kept:
        return dataset.subset(kept), dropped
    longest = max(range(len(lengths)), key=lengths.__getitem__)
    raise DataError(
        f"{dataset.where(longest)}: the prompt has {lengths[longest]} tokens, chat template included; "
        f"rollout.max_prompt_tokens={max_prompt_tokens} and {dropped} of {len(lengths)} prompts are longer; "
        f"raise rollout.max_prompt_tokens" + ("" if drop else ", or set data.drop_long_prompts=true to leave them out")
    )
