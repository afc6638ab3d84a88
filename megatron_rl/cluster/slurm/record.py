"""What a job remembers from one attempt, and one requeue, to the next: RUN/logs/NAME-JOBID/job.json. No decisions."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron_rl.files import write_atomic


@dataclass
class JobRecord:
    """Everything that outlives an attempt; `save` after a change.

    Attributes:
        attempts: one entry each: number, nodes by role, outcome, seconds to the first progress.
        strikes: how often an attempt failed on a node.
        requeues: how often the job put itself back into the queue.
        requeued_at: newest checkpoint's name at the last requeue, None when there was none.
    """

    path: Path
    attempts: list[dict[str, Any]] = field(default_factory=list)
    strikes: dict[str, int] = field(default_factory=dict)
    requeues: int = 0
    requeued_at: str | None = None

    @classmethod
    def load(cls, path: Path) -> JobRecord:
        """From its file, or empty."""
        return cls(path, **json.loads(path.read_text())) if path.exists() else cls(path)

    def save(self) -> None:
        """Replace the file."""
        values = {name: value for name, value in asdict(self).items() if name != "path"}
        write_atomic(self.path, json.dumps(values, indent=1))

    def begin(self, nodes: dict[str, list[str]], checkpoint: str | None) -> int:
        """A new attempt; returns its number."""
        number = len(self.attempts) + 1
        self.attempts.append({"attempt": number, "began": time.time(), "nodes": nodes, "from": checkpoint})
        self.save()
        return number

    def finish(self, verdict: str, reason: str, nodes: tuple[str, ...], first_row_s: float | None) -> None:
        """How the newest attempt ended; its nodes get a strike when it failed there."""
        self.attempts[-1] |= {
            "ended": time.time(),
            "verdict": verdict,
            "reason": reason.splitlines()[0],
            "first_row_s": first_row_s,
        }
        for node in nodes:
            self.strikes[node] = self.strikes.get(node, 0) + 1
        self.save()
