"""The least that a configuration can say, for tests of what else it says; nothing that it names exists."""

from __future__ import annotations

from typing import Any

from megatron_rl.config import Config, validate

LEAST: dict[str, Any] = {
    "run_dir": "unused",
    "model": {"path": "unused"},
    "data": {"prompts": "unused.jsonl"},
    "reward": {"components": [{"name": "exact"}]},
}


def least(**sections: Any) -> Config:
    """`LEAST` with these sections added or put in place of its own."""
    return validate(LEAST | sections)
