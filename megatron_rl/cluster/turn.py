"""Whose turn it is on devices that engines and trainer share: RUN/endpoints/turn.json. Who acts on it is not here.

An engine that dies in the trainer's turn must not be started again before the engines' next one: it would find no
memory. The trainer's rank 0 writes the file, the engines' supervisors read it.
"""

from __future__ import annotations

import json
from pathlib import Path

from megatron_rl.files import write_atomic


def set_turn(endpoints: Path, trainer: bool) -> None:
    """Say that it is the trainer's turn, or the engines'; `endpoints` is that folder of the run."""
    write_atomic(endpoints / "turn.json", json.dumps({"turn": "trainer" if trainer else "engines"}))


def engines_may_start(endpoints: Path) -> bool:
    """True unless it is the trainer's turn; without a file, devices are not shared."""
    try:
        return bool(json.loads((endpoints / "turn.json").read_text())["turn"] != "trainer")
    except FileNotFoundError:
        return True
