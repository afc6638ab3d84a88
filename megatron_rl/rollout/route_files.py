"""Which files of routes are needed, and the removal of the others. What is in them is known to `routes`.

A file belongs to one attempt at one group: its name begins with the group's and the attempt's pack. It is needed

    while its group is alive (in flight, suspended, finished): what its samples refer to, and what is being written
    while a checkpoint is kept that refers to it: RUN/routes/saved-STEP.json lists its files

All else goes after every step: what was trained on, dropped or given back, and what a dead process left.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import orjson

from megatron_rl.files import regular, write_atomic
from megatron_rl.routes import RouteStore

from .sample import GROUP_DIGITS, Group

if TYPE_CHECKING:  # rank 0 of the trainer calls `discard_lists_after` and needs no more
    from .generate import GroupMaker
    from .pool import GroupPool

log = logging.getLogger(__name__)
_LIST = re.compile(r"saved-(\d{6,})\.json")
_OF_GROUP = re.compile(rf"s(\d{{{GROUP_DIGITS}}})-")


class RouteFiles:
    """Those of one run. Belongs to the controller, which alone removes files."""

    def __init__(self, run_dir: str | Path, store: RouteStore, pool: GroupPool, maker: GroupMaker) -> None:
        self._checkpoints, self._store = Path(run_dir) / "checkpoints", store
        self._pool, self._maker = pool, maker
        self._removal: asyncio.Task[None] | None = None
        self._saving: Collection[str] = ()

    async def keep(self, step: int, groups: Iterable[Group]) -> None:
        """What these groups refer to is part of the checkpoint of `step`: make it durable. Raises OSError."""
        files = self._saving = _files_of(groups)
        await asyncio.to_thread(self._list, f"saved-{step:06d}.json", sorted(files))

    def _list(self, name: str, files: list[str]) -> None:
        self._store.sync(files)
        if files or self._store.folder.is_dir():
            write_atomic(self._store.folder / name, orjson.dumps(files))

    def forget_lost(self, groups: Iterable[Group]) -> None:
        """Samples whose files are gone or cut off, as of a run that was copied without them, lose their routes.

        The next answer to one that is not finished reports those of all tokens again.
        """
        sizes = {path.name: path.stat().st_size for path in self._store.folder.glob("s*")}
        lost = 0
        for sample in (sample for group in groups for sample in group.samples):
            if any(part.offset + self._store.size(part) > sizes.get(part.file, -1) for part in sample.routes):
                sample.routes.clear()
                lost += 1
        if lost:
            log.warning(
                "%d samples of the checkpoint refer to routes of experts that are not in %s: they are routed anew",
                lost,
                self._store.folder,
            )

    def remove_later(self) -> None:
        """Remove what is not needed, in the background."""
        if self._removal is None or self._removal.done():
            self._removal = asyncio.create_task(self.remove())

    async def remove(self) -> None:
        """Remove what is not needed.

        Listed first, judged then: a file that is made meanwhile is not listed, one that is listed has a group that is
        alive, or will never have one.
        """
        try:
            names, saved = await asyncio.to_thread(self._look)
            needed = self._needed()
            await asyncio.to_thread(self._unlink, [name for name in names if name not in saved and not needed(name)])
        except OSError as error:
            log.warning("routes of experts that nobody needs could not be removed: %s", error)

    def _look(self) -> tuple[list[str], set[str]]:
        """Names of files of groups, and those that kept checkpoints refer to. Lists of other checkpoints go."""
        if not self._store.folder.is_dir():
            return [], set()
        names = [path.name for path in self._store.folder.iterdir()]
        steps = {int(match[1]): name for name in names if (match := _LIST.fullmatch(name))}
        saved: set[str] = set()
        for step, name in steps.items():
            # The newest may belong to a checkpoint that is being written.
            if step == max(steps) or (self._checkpoints / f"step-{step:06d}").is_dir():
                saved.update(_read_list(self._store.folder / name))
            else:
                self._unlink([name])
        return [name for name in names if _OF_GROUP.match(name)], saved

    def _needed(self) -> Callable[[str], bool]:
        pool, maker = self._pool, self._maker
        kept = {**pool.finished, **pool.partials}
        made = {i: maker.in_flight[i] for i in pool.in_flight if i in maker.in_flight}
        files = {*_files_of([*kept.values(), *made.values()]), *self._saving}
        packs = {i: f"{maker.packs[i]}." for i in made if i in maker.packs}
        unclear = pool.in_flight - made.keys()  # just begun, or just over: they are looked at next time

        def needed(name: str) -> bool:
            match = _OF_GROUP.match(name)
            group_id = int(match[1]) if match else -1
            return name in files or group_id in unclear or name.startswith(packs.get(group_id, "\0"))

        return needed

    def _unlink(self, names: Iterable[str]) -> None:
        for name in names:
            (self._store.folder / name).unlink(missing_ok=True)


def _read_list(file: Path) -> list[str]:
    """Raises OSError for what is no list: what its checkpoint refers to is not known then, and nothing may go."""
    try:
        return list(orjson.loads(regular(file).read_bytes()))
    except (ValueError, TypeError) as error:
        raise OSError(f"{file}: not a list of files ({error}); they all stay while its checkpoint does") from error


def discard_lists_after(run_dir: Path, step: int) -> None:
    """Forget what checkpoints after `step` referred to, once they are gone: the run was cut back to `step`.

    Of what is left the newest list is the one that may belong to a checkpoint that is being written.
    """
    for path in (run_dir / "routes").glob("saved-*.json"):
        match = _LIST.fullmatch(path.name)
        if match and int(match[1]) > step:
            path.unlink(missing_ok=True)


def _files_of(groups: Iterable[Group]) -> set[str]:
    return {part.file for group in groups for sample in group.samples for part in sample.routes}
