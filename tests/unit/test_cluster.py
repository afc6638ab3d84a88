"""Processes of a run: rank-zero agreement, the run directory's lock, and ends of processes in words."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO

import pytest
import torch.distributed as dist

from megatron_rl import addresses
from megatron_rl.addresses import EPHEMERAL, free_port
from megatron_rl.cluster import run_dir
from megatron_rl.cluster.liveness import answers
from megatron_rl.cluster.local import _first_failure, run_local
from megatron_rl.cluster.processes import decode_exit, start, stop, tail
from megatron_rl.cluster.rank_zero import RankZero, RankZeroError
from megatron_rl.cluster.resume import Resume, nothing_to_do, require_same_run
from megatron_rl.cluster.run_dir import Anchor, RunDir, RunDirError
from megatron_rl.config import dump
from tests.least import least
from tests.processes import has_ended, wait_until


def test_every_rank_gets_what_rank_zero_computed() -> None:
    store = dist.HashStore()
    got: dict[int, object] = {}

    def rank(number: int) -> None:
        zero = RankZero(store, number)
        got[number] = [zero.run("a sum", lambda: number + 1, 20), zero.run("a word", lambda: f"from {number}", 20)]

    threads = [threading.Thread(target=rank, args=(n,)) for n in (2, 1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == {n: [1, "from 0"] for n in range(3)}


def test_a_failure_on_rank_zero_reaches_every_rank_with_its_message() -> None:
    store = dist.HashStore()
    with pytest.raises(ZeroDivisionError):
        RankZero(store, 0).run("the impossible", lambda: 1 // 0, 5)
    with pytest.raises(RankZeroError, match="the impossible: integer"):
        RankZero(store, 1).run("the impossible", lambda: 0, 5)


def test_waiting_for_rank_zero_ends_at_the_deadline_and_says_what_for() -> None:
    with pytest.raises(RankZeroError, match=r"waited 0 s for rank 0: rollouts of step 7"):
        RankZero(dist.HashStore(), 1).run("rollouts of step 7", lambda: 0, 0.1)


def test_a_run_directory_is_used_by_one_run_at_a_time(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    owner = rf"in use by process {os.getpid()} on {socket.gethostname()}, running for 0 min; choose another run_dir"
    with run.locked(), pytest.raises(RunDirError, match=owner), run.locked():
        pass
    with run.locked():
        pass


def refuse_after(action: Callable[[], None]) -> None:
    action()
    raise ValueError("refused")


def test_a_refusal_leaves_no_directory_that_was_not_there(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    for path in (tmp_path / "there" / "new" / "run", tmp_path / "there"):
        with pytest.raises(ValueError, match="refused"), RunDir(path).locked():
            raise ValueError("refused")
    assert [path.name for path in (tmp_path / "there").iterdir()] == [".lock"]
    with pytest.raises(ValueError, match="refused"), RunDir(tmp_path / "new").locked():
        refuse_after(lambda: RunDir(tmp_path / "new").prepare(resume=False))
    assert (tmp_path / "new" / "logs").is_dir()


def test_a_lock_whose_file_was_removed_before_it_was_held_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, real, seen = RunDir(tmp_path / "run"), run_dir.try_lock, []

    def removed_at_first(handle: IO[str]) -> bool:
        if not seen:
            os.unlink(handle.name)
        seen.append(handle)
        return real(handle)

    monkeypatch.setattr(run_dir, "try_lock", removed_at_first)
    with run.locked():
        assert (run.path / ".lock").stat().st_size > 0
    assert len(seen) == 2


def test_a_directory_that_is_moved_while_it_is_held_is_noticed(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    with run.locked():
        anchor = Anchor(run)
        anchor.require()
        run.path.rename(tmp_path / "elsewhere")
        with pytest.raises(RunDirError, match=r"run_dir=.*/run was moved, renamed or removed while .*--resume"):
            anchor.require()
        run.prepare(resume=True)  # made again by a process that went on writing
        with pytest.raises(RunDirError, match="was moved"):
            anchor.require()
        shutil.rmtree(run.path)
        (tmp_path / "elsewhere").rename(run.path)
        anchor.require()


def test_an_earlier_run_is_not_overwritten_unless_resumed(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.prepare(resume=False)
    run.metrics.write_text("{}\n")
    with pytest.raises(RunDirError, match="add --resume"):
        run.prepare(resume=False)
    run.prepare(resume=True)


def test_an_unwritable_run_directory_is_a_plain_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirError, match="choose another run_dir"):
        RunDir(tmp_path / "file" / "run").prepare(resume=False)


def test_a_run_directory_below_a_file_or_that_is_one_is_a_plain_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(RunDirError, match=r"cannot be written: .*choose another run_dir"), RunDir(path).locked():
            pass


def test_a_read_only_run_directory_is_a_plain_error(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir(mode=0o555)
    root = os.geteuid() == 0
    if root:  # whom no mode keeps out
        os.seteuid(65534)
    try:
        with pytest.raises(RunDirError, match=r"cannot be written: .*Permission denied.*choose another run_dir"):
            with RunDir(folder).locked():
                pass
    finally:
        if root:
            os.seteuid(0)


def test_an_error_while_the_directory_is_held_stays_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), RunDir(tmp_path / "run").locked():
        (tmp_path / "nothing").read_text()


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "ended"),
        (75, "can be resumed"),
        (-9, "SIGKILL (out of memory"),
        (137, "SIGKILL"),
        (143, "SIGTERM"),
        (3, "code 3"),
    ],
)
def test_exit_codes_are_put_in_words(code: int, words: str) -> None:
    assert words in decode_exit(code)


def test_stopping_ends_the_grandchildren_too(tmp_path: Path) -> None:
    script = "import subprocess,sys; p=subprocess.Popen(['sleep','600']); print(p.pid, flush=True); p.wait()"
    role = start("engine", 0, [sys.executable, "-c", script], dict(os.environ), tmp_path / "log")
    wait_until(lambda: tail(tmp_path / "log").strip())
    grandchild = int(tail(tmp_path / "log"))
    stop([role], timeout_s=10)
    assert role.process.returncode == -signal.SIGTERM
    wait_until(lambda: has_ended(grandchild))


def test_a_process_that_ignores_term_is_killed_after_the_timeout(tmp_path: Path) -> None:
    script = (
        "import signal,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('on', flush=True); time.sleep(600)"
    )
    role = start("engine", 0, [sys.executable, "-c", script], dict(os.environ), tmp_path / "log")
    wait_until(lambda: tail(tmp_path / "log").strip())
    stop([role], timeout_s=0.3)
    assert role.process.returncode == -signal.SIGKILL
    assert "SIGKILL" in role.describe_exit()


@pytest.mark.parametrize(
    ("ends", "named"),
    [
        (["exit 1", "kill -KILL $$"], "trainer-1 was ended by SIGKILL (out of memory?"),
        (["exit 1", "kill -SEGV $$"], "trainer-1 was ended by SIGSEGV"),
        (["exit 1", "kill -ABRT $$"], "trainer-0 failed with exit code 1"),
        (["exit 75", "exit 3"], "trainer-1 failed with exit code 3"),
    ],
)
def test_a_rank_that_was_killed_is_named_before_those_that_fell_because_of_it(tmp_path, ends, named) -> None:
    roles = [
        start("trainer", rank, ["sh", "-c", end], dict(os.environ), tmp_path / f"{rank}.log")
        for rank, end in enumerate(ends)
    ]
    for role in roles:
        role.process.wait()
    assert named in _first_failure(roles, roles)


def test_a_role_dies_with_the_launcher_however_that_dies(tmp_path: Path) -> None:
    launcher = (
        "import os, sys, time; from pathlib import Path; from megatron_rl.cluster.processes import start\n"
        "r = start('engine', 0, ['sleep', '600'], dict(os.environ), Path(sys.argv[1]))\n"
        "print(r.process.pid, flush=True)\n"
        "time.sleep(600)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", launcher, str(tmp_path / "log")], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    child = int(process.stdout.readline())
    process.kill()
    process.wait()
    process.stdout.close()
    wait_until(lambda: has_ended(child))


def test_a_failure_on_a_full_disk_names_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason may be missing from the log for want of room."""
    role = start("trainer", 0, [sys.executable, "-c", "import sys; sys.exit(1)"], dict(os.environ), tmp_path / "log")
    role.process.wait(20)
    assert "MiB are free" not in role.describe_exit()
    monkeypatch.setattr("megatron_rl.cluster.processes.NEARLY_FULL", 2**62)  # as if what is free here were too little
    assert "MiB are free" in role.describe_exit()


def test_a_failure_without_the_run_s_directory_says_that_it_is_gone(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    role = start("trainer", 0, [sys.executable, "-c", "exit(3)"], dict(os.environ), folder / "trainer-0.log")
    role.process.wait(60)
    role.log.unlink()
    folder.rmdir()
    assert "trainer-0 failed with exit code 3" in role.describe_exit()
    assert "the run's directory was taken away meanwhile" in role.describe_exit()


def test_a_directory_stays_held_while_a_process_of_the_run_lives_on_after_its_launcher(tmp_path: Path) -> None:
    launcher = (
        "import os, signal, sys; from pathlib import Path\n"
        "from megatron_rl.cluster.processes import start; from megatron_rl.cluster.run_dir import RunDir\n"
        "lock = RunDir(sys.argv[1]).locked(); fd = lock.__enter__()\n"
        "argv = [sys.executable, '-c', 'import signal; signal.pause()']\n"
        "r = start('trainer', 0, argv, dict(os.environ), Path(sys.argv[2]), lock=fd, orphan_signal=signal.SIGCONT)\n"
        "print(r.process.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    folder = tmp_path / "run"
    argv = [sys.executable, "-c", launcher, str(folder), str(tmp_path / "log")]
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, timeout=60)
    survivor = int(done.stdout)
    try:
        with pytest.raises(RunDirError, match="processes that outlived their launcher"), RunDir(folder).locked(0.2):
            pass
        threading.Timer(0.3, os.kill, (survivor, signal.SIGKILL)).start()
        with RunDir(folder).locked(20):
            wait_until(lambda: has_ended(survivor))
    finally:
        if not has_ended(survivor):
            os.kill(survivor, signal.SIGKILL)


def test_a_resumed_run_must_decide_as_before_and_the_message_names_every_change(tmp_path: Path) -> None:
    recorded = tmp_path / "config.yaml"
    recorded.write_text(dump(least()))
    sections = {"rollout": {"group_size": 2}, "data": {"prompts": "q", "shuffle": False}}
    other = least(seed=4, **sections, moe={"max_routing_mismatch": 0.5})
    with pytest.raises(RunDirError, match="--accept-changes") as refusal:
        require_same_run(recorded, other, accept_changes=False)
    changes = ["seed: 0 -> 4", "data.shuffle: True -> False", "rollout.group_size: 16 -> 2"]
    changes.append("moe.max_routing_mismatch: None -> 0.5")
    assert "; ".join(changes) in str(refusal.value)
    assert require_same_run(recorded, other, accept_changes=True) == changes


def test_layout_deadlines_and_length_of_a_resumed_run_are_free(tmp_path: Path) -> None:
    recorded = tmp_path / "config.yaml"
    recorded.write_text(dump(least()))
    changed = least(
        steps=9,
        parallel={"tensor_model_parallel_size": 2},
        algorithm={"max_tokens_per_microbatch": 9},
        rollout={"request_timeout_s": 5},
        checkpoint={"every": 1},
        cluster={"stop_timeout_s": 1},
    )
    assert require_same_run(recorded, changed, accept_changes=False) == []


def test_a_complete_run_is_named_as_such_and_nothing_of_it_is_touched(tmp_path: Path) -> None:
    run, cfg = RunDir(tmp_path), least(run_dir=str(tmp_path), steps=3)
    run.prepare(resume=False)
    run.write_config(dump(cfg))
    checkpoint = run.checkpoints / "step-000003"
    checkpoint.mkdir()
    assert nothing_to_do(run, checkpoint, cfg) is None  # ended before it wrote its result
    for file, at in ((run.report, 1), (run.result, 2)):
        file.write_text("{}")
        os.utime(file, (at, at))
    assert nothing_to_do(run, checkpoint, cfg) is None  # ended before it wrote its last report
    run.report.write_text("{}")
    before, said = sorted(tmp_path.rglob("*")), list[str]()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        assert run_local(cfg, Resume(lambda: checkpoint), said.append) == 0
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert said == [
        f"run_dir={tmp_path} is complete (step 3, steps=3): nothing was started. "
        f"See {tmp_path}/report.html, or go on with steps=N, N more than 3"
    ]
    assert sorted(tmp_path.rglob("*")) == sorted([*before, tmp_path / ".lock"])
    assert nothing_to_do(run, checkpoint, least(steps=4)) is None


def test_a_failure_is_told_without_what_an_earlier_start_wrote(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("an old reason\n")
    argv = [sys.executable, "-c", "import sys; sys.exit('the new reason')"]
    role = start("trainer", 0, argv, dict(os.environ), tmp_path / "log")
    role.process.wait(20)
    assert "the new reason" in role.describe_exit()
    assert "an old reason" not in role.describe_exit()


def test_a_free_port_is_none_that_the_system_gives_away_by_itself() -> None:
    first_ephemeral = int(EPHEMERAL.read_text().split()[0])
    ports = {free_port() for _ in range(20)}
    assert len(ports) > 1
    assert all(port < first_ephemeral for port in ports)


def test_a_port_in_use_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setattr(addresses, "LOWEST", taken.getsockname()[1])
        monkeypatch.setattr(addresses, "_first_ephemeral", lambda: taken.getsockname()[1] + 1)
        with pytest.raises(OSError, match="in use"):
            free_port()


def test_an_answer_that_is_no_http_is_none() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            with server.accept()[0] as connection:
                connection.recv(1000)
                connection.sendall(b"what?\r\n\r\n")

        answering = threading.Thread(target=answer)
        answering.start()
        assert not answers(f"http://127.0.0.1:{server.getsockname()[1]}", None, 60.0)
        answering.join()
