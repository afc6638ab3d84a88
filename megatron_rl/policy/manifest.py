"""What `manifest.json` of a checkpoint says, and its text; which files there are, and where, is `checkpoint.py`'s."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from megatron_rl.policy.digest import digest_of


@dataclass(frozen=True)
class FileFacts:
    """What a file must be: its size in bytes, and the hash of its content."""

    size: int
    xxh3_128: str


@dataclass(frozen=True)
class Manifest:
    """What `manifest.json` says.

    Attributes:
        step: RL steps that were trained.
        metric: value of `checkpoint.metric` (larger is better), None when it was not measured.
        layout: sizes of the parallel layout that wrote it, and whether the optimizer was distributed.
        config_hash: of the whole configuration.
        files: every other file, by its path within the checkpoint.
        model: what decides the names and sizes of its weights; empty in checkpoints of early versions.
    """

    step: int
    metric: float | None
    layout: dict[str, Any]
    config_hash: str
    files: dict[str, FileFacts]
    model: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """Its text, with a hash of all the rest at the end."""
        facts = asdict(self)
        return json.dumps(facts | {"digest": digest_of(json.dumps(facts).encode())}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """The inverse of `to_json`. Raises ValueError, TypeError or KeyError for any other text."""
        facts = dict(json.loads(text))
        if facts.pop("digest") != digest_of(json.dumps(facts).encode()):
            raise ValueError("its content is not what was written")
        files = {name: FileFacts(**found) for name, found in facts.pop("files").items()}
        return cls(**facts, files=files)
