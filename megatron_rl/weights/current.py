"""Which weights the engines serve: RUN/weights/current.json, for an engine that starts in mid-run. Loads no weights.

The trainer writes it twice an update: before it tells the engines, so that one which restarts from then on loads the
new weights by itself, and after all of them hold the same bytes, with their checksum. A version directory is a whole
Hugging Face model, so nothing else is needed to bring an engine up to date.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from megatron_rl.files import write_atomic
from megatron_rl.pins import pin

FILE_NAME = "current.json"


@dataclass(frozen=True)
class CurrentWeights:
    """One published version.

    Attributes:
        version: its number, the label that engines report.
        path: its Hugging Face directory.
        checksum: of the engines that loaded it, None until they have; see `/weights_checker`, `per_engine_checksum`.
    """

    version: int
    path: str
    checksum: str | None = None


def announce(weights_dir: Path, weights: CurrentWeights) -> None:
    """Write the record, atomically. One writer: the trainer's rank 0."""
    write_atomic(weights_dir / FILE_NAME, json.dumps(asdict(weights)))


def current(weights_dir: Path, staged: Path | None = None) -> CurrentWeights | None:
    """The record, None before the first version was published.

    With the path of a copy where there is one: `staged` is a folder with copies of version directories.
    """
    try:
        found = CurrentWeights(**json.loads((weights_dir / FILE_NAME).read_text()))
    except FileNotFoundError:
        return None
    copy = staged / Path(found.path).name if staged else None
    return replace(found, path=str(copy)) if copy is not None and copy.is_dir() else found


def to_start_with(run_dir: Path, replica: int, staged: Path | None = None) -> CurrentWeights | None:
    """`current`, for the engine with this number, which is about to read it: what it reads is kept until it serves."""
    while True:
        found = current(run_dir / "weights", staged)
        if found is not None:
            pin(run_dir, replica, Path(found.path).name)
        if current(run_dir / "weights", staged) == found:
            return found
