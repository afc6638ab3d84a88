"""Weights staged in the memory of engine nodes: one copy a machine, what is said when there is none, what is left."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path

import pytest

from megatron_rl.cluster import staging
from megatron_rl.cluster.run_dir import RunDir
from megatron_rl.cluster.staged import Report, Request, read_reports, staged_paths
from megatron_rl.cluster.staging import Stage, StageError, carry_out_requests
from megatron_rl.config import Config
from megatron_rl.pins import pin, pinned
from megatron_rl.weights.current import CurrentWeights, announce, current, to_start_with
from tests.unit.rollout_rig import config

WEIGHTS = b"weights" * 1000


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run")


def version(run: RunDir, number: int, content: bytes = WEIGHTS) -> Path:
    folder = run.weights / f"v{number:06d}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(content)
    return folder


def memory(tmp_path: Path, machine: str) -> Path:
    """The memory of one machine."""
    (tmp_path / machine).mkdir(exist_ok=True)
    return tmp_path / machine


def settings(run: RunDir, replicas: int, **engine: object) -> Config:
    """A run whose engines have published their addresses."""
    cfg = config(run.path, run.path, [], engine={"replicas": replicas, "stage_in_memory": True, **engine})
    run.endpoints.mkdir(parents=True, exist_ok=True)
    for replica in range(replicas):
        run.engine_endpoint(replica).write_text(json.dumps({"url": f"http://{replica}", "pid": 1}))
    return cfg


@contextmanager
def supervisor(run: RunDir, memory: Path, node: str, *replicas: int) -> Iterator[Stage]:
    """What the supervisor of these engines does beside starting them."""
    with (
        Stage(run, memory) as stage,
        carry_out_requests(stage, run, Report(node, [*replicas]), f"{node}-{replicas[0]}"),
    ):
        yield stage


def test_each_machine_reads_a_version_once_and_every_engine_gets_its_copy(run: RunDir, tmp_path: Path) -> None:
    cfg = settings(run, 4)
    folders = {node: memory(tmp_path, node) for node in ("a", "b")}
    with ExitStack() as stack:
        # On machine a two supervisors share the copy; machine b has one for two engines.
        stages = [
            stack.enter_context(supervisor(run, folders["a"], "a", 0)),
            stack.enter_context(supervisor(run, folders["a"], "a", 1)),
            stack.enter_context(supervisor(run, folders["b"], "b", 2, 3)),
        ]
        for number in (7, 8, 8):  # version 8 is written twice, as weights are while a warm-up is looked at
            content = WEIGHTS + str(time.monotonic()).encode()
            folder = version(run, number, content)
            paths = staged_paths(cfg, folder, poll_s=0.01)
            assert staged_paths(cfg, folder, poll_s=0.01) == paths  # as when one engine is given them again
            assert paths == {
                f"http://{i}": str(stages[place].folder / f"v{number:06d}") for i, place in enumerate((0, 1, 2, 2))
            }
            for path in paths.values():
                assert (Path(path) / "model.safetensors").read_bytes() == content
            for stage in stages:
                assert [path.name for path in stage.folder.glob("v*")] == [f"v{number:06d}"]
        assert stages[0].copies + stages[1].copies == 3
        assert stages[2].copies == 3
        assert stages[0].folder.stat().st_mode & 0o777 == 0o700
    assert not any(any(folder.iterdir()) for folder in folders.values())


def test_nodes_that_are_late_are_named(run: RunDir, caplog: pytest.LogCaptureFixture) -> None:
    cfg, folder = settings(run, 3, update_timeout_s=0.2), version(run, 3)
    Report("slow", [0, 1]).write(run.staged, "slow")
    assert staged_paths(cfg, folder, poll_s=0.01) == {}
    assert f"slow, the node of engine-2: no copy of {folder} in memory within 0.1 s (half of engine.upd" in caplog.text


def test_the_engines_of_a_node_that_cannot_copy_read_the_directory_itself(
    run: RunDir, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cfg, folder = settings(run, 2), version(run, 3)
    (tmp_path / "bad").touch()  # no directory can be made there
    with supervisor(run, memory(tmp_path, "a"), "a", 0), supervisor(run, tmp_path / "bad", "bad", 1):
        assert list(staged_paths(cfg, folder, poll_s=0.01)) == ["http://0"]
    assert "node bad: no copies in memory: " in caplog.text
    assert f"its engines read {folder} itself" in caplog.text


def test_a_run_that_is_to_end_does_not_wait_for_copies(run: RunDir) -> None:
    assert staged_paths(settings(run, 2), version(run, 1), interrupted=lambda: True) == {}


def test_a_replica_of_several_nodes_gets_a_path_only_when_all_of_them_hold_it(run: RunDir, tmp_path: Path) -> None:
    cfg = settings(run, 1, kind="sglang", tp=2, nodes_per_replica=2, update_timeout_s=0.4)
    folder = version(run, 1)
    with supervisor(run, memory(tmp_path, "a"), "a", 0) as stage:
        assert staged_paths(cfg, folder, poll_s=0.01) == {}
        with supervisor(run, memory(tmp_path, "a"), "b", 0):
            cfg = settings(run, 1, kind="sglang", tp=2, nodes_per_replica=2)
            assert staged_paths(cfg, folder, poll_s=0.01) == {"http://0": str(stage.folder / "v000001")}


@pytest.mark.parametrize(("room", "free"), [("has room for", 2**20), ("the machine has memory for", 2**40)])
def test_what_does_not_fit_is_refused_with_both_sizes_and_nothing_is_copied(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: str, free: int
) -> None:
    folder = version(run, 1)
    with open(folder / "model.safetensors", "ab") as file:
        file.truncate(2**30)  # without taking any disk
    monkeypatch.setattr(staging.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(0, 0, free))
    monkeypatch.setattr(staging.psutil, "virtual_memory", lambda: type("", (), {"available": 2**20}))
    with Stage(run, memory(tmp_path, "a")) as stage:
        with pytest.raises(StageError, match=rf"takes 1.00 GiB, and .*{room} 0.00 GiB: make room, or set engine.stage"):
            stage.copy(Request(str(folder), "stamp"))
        assert not list(stage.folder.glob("*v0*"))


def test_a_file_that_shrinks_on_the_way_and_a_directory_that_vanishes_are_no_copies(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = version(run, 1)
    with Stage(run, memory(tmp_path, "a")) as stage:
        monkeypatch.setattr(staging.os, "sendfile", lambda *_: 0)
        with pytest.raises(StageError, match=r"config.json: 0 of 2 bytes were copied"):
            stage.copy(Request(str(folder), "stamp"))
        assert not list(stage.folder.glob("*v0*"))
        monkeypatch.undo()
        shutil.rmtree(folder)
        with pytest.raises(StageError, match=r"v000001 could not be copied to .*No such file"):
            stage.copy(Request(str(folder), "stamp"))
        assert not list(stage.folder.glob("v*"))


def test_a_copy_that_is_being_made_does_not_hold_up_the_end(run: RunDir, tmp_path: Path) -> None:
    with Stage(run, memory(tmp_path, "a")) as stage:
        stage.give_up()
        with pytest.raises(StageError, match="the supervisor ends"):
            stage.copy(Request(str(version(run, 1)), "stamp"))


def test_a_start_removes_what_killed_supervisors_left_and_nothing_that_is_in_use(run: RunDir, tmp_path: Path) -> None:
    shm = memory(tmp_path, "a")
    mine, others, used = Stage(run, shm).folder, shm / "megatron_rl-other", shm / "megatron_rl-used"
    for folder in (mine, others, used):
        (folder / "v000009").mkdir(parents=True)
        (folder / ".copying-v000010").mkdir()
    (shm / "something else").mkdir()
    with open(used / ".lock", "a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        with Stage(run, shm):
            assert sorted(path.name for path in shm.iterdir()) == sorted([mine.name, used.name, "something else"])
            assert not any(path.is_dir() for path in mine.iterdir())
            assert (used / "v000009").is_dir()
            with Stage(run, shm) as second:  # of the same run: it leaves the first one's copies alone
                second.copy(Request(str(version(run, 1)), "stamp"))
            assert (mine / "v000001").is_dir()
    assert not mine.exists()


def test_an_engine_that_starts_reads_the_copy_where_there_is_one(run: RunDir, tmp_path: Path) -> None:
    folder = version(run, 5)
    announce(run.weights, CurrentWeights(5, str(folder), "sum"))
    with Stage(run, memory(tmp_path, "a")) as stage:
        assert current(run.weights, stage.folder) == CurrentWeights(5, str(folder), "sum")
        copy = stage.copy(Request(str(folder), "stamp"))
        assert current(run.weights, stage.folder) == CurrentWeights(5, str(copy), "sum")


def test_what_an_engine_has_begun_to_read_is_kept_until_it_has_published_its_address(
    run: RunDir, tmp_path: Path
) -> None:
    assert to_start_with(run.path, 0) is None
    with Stage(run, memory(tmp_path, "a")) as stage:
        for number in (5, 6):
            announce(run.weights, CurrentWeights(number, str(version(run, number))))
            stage.copy(Request(str(run.weights / f"v{number:06d}"), f"stamp {number}"))
            if number == 5:
                assert to_start_with(run.path, 0, stage.folder) == CurrentWeights(5, str(stage.folder / "v000005"))
        assert pinned(run.path) == {"v000005"}
        assert sorted(path.name for path in stage.folder.glob("v*")) == ["v000005", "v000006"]
        stage.copy(Request(str(version(run, 5)), "written again"))
        assert [path.name for path in stage.folder.glob("v*")] == ["v000005"]
        run.engine_endpoint(0).write_text(json.dumps({"url": "http://0", "pid": os.getpid() + 1}))  # its forerunner's
        assert pinned(run.path) == {"v000005"}
        run.engine_endpoint(0).write_text(json.dumps({"url": "http://0", "pid": os.getpid()}))
        assert pinned(run.path) == set()
        stage.copy(Request(str(run.weights / "v000006"), "stamp 6"))
        assert [path.name for path in stage.folder.glob("v*")] == ["v000006"]


def test_an_engine_that_starts_while_new_weights_are_announced_takes_those(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    announce(run.weights, CurrentWeights(1, str(version(run, 1))))
    newer = CurrentWeights(2, str(version(run, 2)))

    def pin_late(run_dir: Path, replica: int, name: str) -> None:
        announce(run.weights, newer)
        pin(run_dir, replica, name)

    monkeypatch.setattr("megatron_rl.weights.current.pin", pin_late)
    assert to_start_with(run.path, 0) == newer
    assert pinned(run.path) == {"v000002"}


def test_a_new_start_of_the_run_forgets_what_supervisors_have_said(run: RunDir) -> None:
    Report("a", [0]).write(run.staged, "a")
    assert [asdict(report)["node"] for report in read_reports(run.staged)] == ["a"]
    run.prepare(resume=True)
    assert read_reports(run.staged) == []
