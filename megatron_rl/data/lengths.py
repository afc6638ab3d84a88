"""Which prompts and supervised examples fit: measured once, before a run; never truncates one."""

from __future__ import annotations

from .dataset import PromptDataset
from .records import DataError
from .tokenizer import PromptTokenizer


def check_targets(dataset: PromptDataset, tokenizer: PromptTokenizer, max_tokens: int, reason: str) -> None:
    """Raise `DataError`, naming the longest, when prompt and target together have more than `max_tokens` tokens.

    `reason` says which key or file sets that bound.
    """
    lengths = [sum(map(len, tokenizer.encode_sft(record))) for record in dataset]
    longest = max(range(len(lengths)), key=lengths.__getitem__)
    if lengths[longest] > max_tokens:
        too_long = sum(length > max_tokens for length in lengths)
        raise DataError(
            f"{dataset.where(longest)}: prompt and target have {lengths[longest]} tokens, but {reason} allows "
            f"{max_tokens}; {too_long} of {len(lengths)} examples are longer: shorten them or leave them out"
        )


def fit_to_length(
    dataset: PromptDataset, tokenizer: PromptTokenizer, max_prompt_tokens: int, drop: bool
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
