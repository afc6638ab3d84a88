"""Files of routes stay as long as a sample or a kept checkpoint refers to them, and no longer."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from megatron_rl.bring_up import cut_back
from megatron_rl.data import PromptCursor
from megatron_rl.files import write_atomic
from megatron_rl.rollout.pool import GroupPool
from megatron_rl.rollout.route_files import RouteFiles
from megatron_rl.rollout.sample import Group, Span, group_name
from megatron_rl.rollout.wire import pack_groups, unpack_groups
from megatron_rl.routes import RoutePart, RouteStore


class Rig:
    """A pool and a maker without engines: groups grow when they are told to."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.store = RouteStore(run / "routes", 1, 1, 8)
        self.pool = GroupPool(PromptCursor(1000, seed=0), 100, drops_uninformative=False)
        self.maker = SimpleNamespace(in_flight={}, packs={})
        self.files = RouteFiles(run, self.store, self.pool, cast(Any, self.maker))
        self.made = 0

    def begin(self, group: Group) -> Group:
        self.made += 1
        self.maker.in_flight[group.id] = group
        self.maker.packs[group.id] = f"{group_name(group.id)}{self.made}"
        return group

    def fresh(self) -> Group:
        group_id = self.pool.admit()
        assert group_id is not None
        return Group.start(group_id, "p", np.arange(2), 2, run_seed=0, version=0, temperature=1.0)

    def write(self, group: Group) -> RoutePart:
        sample = group.samples[self.made % 2]
        rows = np.full((3 if not sample.routed else 2, 1, 1), group.id % 8)
        return self.store.append(rows, sample.routed, self.maker.packs[group.id])

    def grow(self, group: Group) -> None:
        sample = group.samples[self.made % 2]
        part = self.write(group)
        sample.append([1, 2], [-1.0, -1.0], [Span(0, 0, 2)], part)

    def leave(self, group: Group) -> None:
        del self.maker.in_flight[group.id], self.maker.packs[group.id]

    def checkpoint(self, step: int) -> list[Group]:
        """What it refers to, as a resumed run would read it."""
        groups = [*self.pool.finished.values(), *self.pool.partials.values(), *self.maker.in_flight.values()]
        asyncio.run(self.files.keep(step, groups))
        (self.run / "checkpoints" / f"step-{step:06d}").mkdir(parents=True)
        return unpack_groups(*pack_groups(groups))

    def require(self, groups: list[Group]) -> None:
        """Everything that these groups refer to can be read and is theirs."""
        for group in groups:
            for sample in group.samples:
                assert (self.store.read(sample.routes, [0], 0, sample.routed) == group.id % 8).all()

    @property
    def there(self) -> set[str]:
        folder = self.run / "routes"
        return {path.name for path in folder.glob("s0*")} if folder.is_dir() else set()


class Life(RuleBasedStateMachine):
    """Groups begin, grow, pause, end and are thrown away while checkpoints come and go."""

    at_work: Bundle[Group] = Bundle("at_work")
    suspended: Bundle[int] = Bundle("suspended")
    finished: Bundle[Group] = Bundle("finished")
    checkpoints: Bundle[int] = Bundle("checkpoints")

    def __init__(self) -> None:
        super().__init__()
        self.rig = Rig(Path(tempfile.mkdtemp()))
        self.saved: dict[int, list[Group]] = {}
        self.step, self.pruned = 0, set[int]()

    def teardown(self) -> None:
        shutil.rmtree(self.rig.run)

    @rule(target=at_work)
    def begin(self) -> Group:
        return self.rig.begin(self.rig.fresh())

    @rule(group=at_work)
    def grow(self, group: Group) -> None:
        if group.id in self.rig.maker.in_flight:
            self.rig.grow(group)

    @rule(group=at_work)
    def lose_an_answer(self, group: Group) -> None:
        if group.id in self.rig.maker.in_flight:
            self.rig.write(group)

    @rule(target=finished, group=consumes(at_work))
    def finish(self, group: Group) -> Any:
        for sample in group.samples:
            sample.finish("stop")
        self.rig.leave(group)
        self.rig.pool.finish(group)
        return group

    @rule(group=consumes(at_work))
    def suspend(self, group: Group) -> None:
        self.rig.leave(group)
        self.rig.pool.suspend(group)

    @rule(target=at_work)
    def resume(self) -> Any:
        group = self.rig.pool.resume()
        if group is None:
            return multiple()
        asyncio.run(self.rig.files.remove())  # between its leaving the pool and its first request
        self.rig.require([group])
        return self.rig.begin(group)

    @rule(group=consumes(at_work))
    def give_back(self, group: Group) -> None:
        self.rig.leave(group)
        self.rig.pool.give_back([group.id])

    @rule(group=consumes(finished))
    def train(self, group: Group) -> None:
        self.rig.pool.retire([group.id], [])

    @rule(target=checkpoints)
    def save(self) -> int:
        if self.step in self.pruned:
            del self.saved[self.step]
        self.step += 1
        self.saved[self.step] = self.rig.checkpoint(self.step)
        return self.step

    @rule(step=consumes(checkpoints))
    def prune(self, step: int) -> None:
        shutil.rmtree(self.rig.run / "checkpoints" / f"step-{step:06d}")
        if step == self.step:
            self.pruned.add(step)  # as if it were still being written: it counts until the next one
        else:
            del self.saved[step]

    @rule()
    def remove(self) -> None:
        asyncio.run(self.rig.files.remove())
        rig = self.rig
        alive = [*rig.pool.finished.values(), *rig.pool.partials.values(), *rig.maker.in_flight.values()]
        groups = [*alive, *(group for saved in self.saved.values() for group in saved)]
        needed = {part.file for group in groups for sample in group.samples for part in sample.routes}
        packs = tuple(f"{pack}." for pack in rig.maker.packs.values())
        assert rig.there == needed | {name for name in rig.there if packs and name.startswith(packs)}

    @invariant()
    def all_is_there(self) -> None:
        self.rig.require([*self.rig.pool.finished.values(), *self.rig.pool.partials.values()])
        self.rig.require([*self.rig.maker.in_flight.values(), *(g for groups in self.saved.values() for g in groups)])


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=12, stateful_step_count=30, deadline=None)


def test_what_a_dead_run_left_goes_and_what_its_checkpoint_refers_to_stays(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    first, second = rig.begin(rig.fresh()), rig.begin(rig.fresh())
    for group in (first, second):
        rig.grow(group)
    saved = rig.checkpoint(3)
    rig.grow(first)
    rig.grow(rig.begin(rig.fresh()))
    resumed = Rig(tmp_path)
    resumed.files.forget_lost(saved)
    assert [len(s.routes) for group in saved for s in group.samples] == [1, 0, 1, 0]
    for group in saved[:1]:
        resumed.pool.admit()
        resumed.pool.suspend(group)
    asyncio.run(resumed.files.remove())
    resumed.require(saved)
    assert len(resumed.there) == 2
    shutil.rmtree(tmp_path / "checkpoints" / "step-000003")
    resumed.checkpoint(4)
    asyncio.run(resumed.files.remove())
    resumed.require(saved[:1])
    assert len(resumed.there) == 1


@pytest.mark.parametrize("content", [b"", b'["s0', b"3"])
def test_nothing_goes_while_a_list_of_a_kept_checkpoint_cannot_be_read(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig(tmp_path)
    rig.grow(rig.begin(rig.fresh()))
    rig.checkpoint(3)
    (tmp_path / "routes" / "saved-000003.json").write_bytes(content)
    resumed = Rig(tmp_path)
    asyncio.run(resumed.files.remove())
    assert resumed.there == rig.there
    assert "saved-000003.json: not a list of files" in caplog.text


def test_a_run_that_goes_on_from_an_earlier_checkpoint_forgets_what_later_ones_referred_to(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    first, second = rig.begin(rig.fresh()), rig.begin(rig.fresh())
    rig.grow(first)
    saved = rig.checkpoint(3)
    rig.grow(second)
    rig.checkpoint(6)
    cut_back(tmp_path, tmp_path / "checkpoints" / "step-000003")
    assert [path.name for path in (tmp_path / "routes").glob("saved-*")] == ["saved-000003.json"]
    resumed = Rig(tmp_path)
    asyncio.run(resumed.files.remove())
    resumed.require(saved)
    assert resumed.there == {part.file for sample in saved[0].samples for part in sample.routes}
    asyncio.run(resumed.files.keep(4, saved[:1]))  # as it is being written, before the checkpoint has its name
    shutil.rmtree(tmp_path / "checkpoints" / "step-000003")
    again = Rig(tmp_path)
    asyncio.run(again.files.remove())
    again.require(saved)


def test_samples_whose_files_are_lost_are_routed_anew_and_the_log_says_how_many(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig(tmp_path)
    group = rig.begin(rig.fresh())
    rig.grow(group)
    rig.made += 1
    rig.grow(group)
    one, other = (sample.routes[0] for sample in group.samples)
    assert one.file == other.file
    file = tmp_path / "routes" / one.file
    file.write_bytes(file.read_bytes()[:-1])
    rig.files.forget_lost([group])
    assert sorted(sample.routed for sample in group.samples) == [0, 3]
    file.unlink()
    rig.files.forget_lost([group])
    assert [sample.routed for sample in group.samples] == [0, 0]
    assert caplog.text.count("1 samples of the checkpoint refer to routes of experts that are not in") == 2


def test_a_file_that_a_checkpoint_being_saved_refers_to_outlives_a_removal_that_had_begun(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    group = rig.begin(rig.fresh())
    rig.grow(group)

    async def run() -> None:
        removal = asyncio.create_task(rig.files.remove())
        await asyncio.sleep(0)  # it has begun to look, and knows of no checkpoint
        saving = asyncio.create_task(rig.files.keep(1, [group]))
        await asyncio.sleep(0)
        rig.leave(group)
        rig.pool.give_back([group.id])
        await asyncio.gather(removal, saving)

    asyncio.run(run())
    rig.require([group])


def test_removal_leaves_what_is_not_its_own_and_a_folder_that_is_not_there(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    asyncio.run(rig.files.remove())
    asyncio.run(rig.files.keep(1, []))
    assert not (tmp_path / "routes").exists()
    write_atomic(tmp_path / "routes" / "notes.txt", "mine")
    asyncio.run(rig.files.remove())
    assert [path.name for path in (tmp_path / "routes").iterdir()] == ["notes.txt"]
