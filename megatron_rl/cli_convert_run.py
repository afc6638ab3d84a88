"""Runs a planned conversion for the command line: alone or as one of several ranks, with a progress bar."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

if TYPE_CHECKING:
    from megatron_rl.weights.convert.actions import Conversion
    from megatron_rl.weights.convert.job import Outcome
    from megatron_rl.weights.convert.one_file import Advance
    from megatron_rl.weights.convert.team import Team

_bar = Console(stderr=True)
SHOWN = 40
"""Lines of one kind in a dry run."""
MEET_S = 300.0
"""Within which all ranks must have started."""


def execute(plan: Conversion, allow_nan: bool) -> Outcome | None:
    """Run it; the outcome on rank 0, None on the others, which print nothing."""
    with _team(plan.out) as team, progress(plan.out.name, plan.size, shown=team.rank == 0) as advance:
        outcome = plan.run(advance, allow_nan, team)
        return outcome if team.rank == 0 else None


def describe(plan: Conversion, ranks: int, gb_per_s: float | None) -> Iterator[str]:
    """Lines that say what a conversion would do.

    Args:
        gb_per_s: how fast a rank converts, in GB of written tensors; None: find out with the first blocks of the plan.
    """
    from megatron_rl.weights.convert.forecast import TRIAL_BYTES, rank_shares, seconds_per_byte
    from megatron_rl.weights.convert.job import existing_parent

    for file in plan.target.files[:SHOWN]:
        yield f"{file.name}  {len(file.tensors)} tensors  {file.size:,} bytes"
    if (more := len(plan.target.files) - SHOWN) > 0:
        yield f"... and {more} more files"
    shares = rank_shares(plan.target, ranks)
    for rank, share in enumerate(shares[:SHOWN]):
        yield (
            f"rank {rank}: writes {share.files} files, {share.written:,} bytes; reads {share.read:,} bytes "
            f"in {share.reads:,} requests"
        )
    if (more := ranks - SHOWN) > 0:
        yield f"... and {more} more ranks"
    most = max(shares, key=lambda share: share.written)
    yield (
        f"largest share: {most.written:,} bytes to write, {most.read:,} to read"
        + ("" if ranks == 1 else ". Between ranks no tensors are sent; each asks rank 0 four times")
    )
    if gb_per_s is None and not any(plan.identity["sources"]):
        yield "time: not known, since without the weights nothing can be tried; give a speed with --gb-per-s"
        return
    speed = 1e-9 / gb_per_s if gb_per_s else seconds_per_byte(plan.target, existing_parent(plan.out))
    how = "as given" if gb_per_s else f"as {min(plan.size, TRIAL_BYTES) / 2**20:.0f} MiB took just now, alone"
    yield f"time: {_duration(most.written * speed)} at {1e-9 / speed:.2f} GB/s a rank, {how}"


def _duration(seconds: float) -> str:
    minutes = int(seconds / 60 + 0.5)
    return f"{seconds:.1f} s" if seconds < 100 else f"{minutes} min" if minutes < 120 else f"{minutes / 60:.1f} h"


@contextmanager
def _team(out: Path) -> Iterator[Team]:
    from megatron_rl.cluster.bootstrap import find_place, is_launched
    from megatron_rl.weights.convert.team import ALONE, Team

    if not is_launched(os.environ):
        yield ALONE
        return
    from megatron_rl.policy.distributed import shared_store

    meeting = out.with_name(f".converting-{out.name}.ranks")
    place = find_place(os.environ, meeting)
    store = shared_store(place, MEET_S)
    try:
        yield Team(place.rank, place.world_size, store)
    finally:
        if place.rank == 0:
            shutil.rmtree(meeting, ignore_errors=True)


@contextmanager
def progress(what: str, total: int, shown: bool = True) -> Iterator[Advance]:
    """A bar of `total` bytes, with speed and remaining time, on a terminal."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=_bar, disable=not (shown and _bar.is_terminal)) as bar:
        yield partial(bar.advance, bar.add_task(what, total=total))
