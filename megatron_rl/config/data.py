"""Section `data:`, where prompts come from and how they become tokens."""

from __future__ import annotations

from pydantic import Field

from .base import Section


class DataConfig(Section):
    """JSONL prompt files; one object a line with `prompt` or `messages`, and what the verifier needs."""

    prompts: str
    """Training prompts (.jsonl)."""
    eval_prompts: str | None = None
    """Held-out prompts (.jsonl); null = no evaluation."""
    system_prompt: str | None = None
    """Put before every prompt that has no system message of its own."""
    chat_template: str | None = None
    """Jinja file used instead of the tokenizer's own template."""
    shuffle: bool = True
    """A new seeded order every epoch."""
    drop_long_prompts: bool = False
    """Leave out (and count) prompts longer than rollout.max_prompt_tokens instead of refusing the file."""
    max_prompts: int | None = Field(None, ge=1)
    """Use only the first so many training prompts."""
