"""Whatever dies, nothing is lost: a run that was killed and resumed ends with the books and numbers of one that ran on.

Deterministic mode: every metric outside time/ and system/ must be equal to the last digit, and so must the ledger.
"""

from __future__ import annotations

import random
import re
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_rl.audit import audit_run

from .live import LiveRun, exact_metrics, rows
from .runs import make_inputs, train

pytestmark = pytest.mark.e2e
TINY = (
    "deterministic=true",
    "sft.max_steps=20",
    "sft.batch_size=16",
    "sft.lr=2e-3",
    "sft.stop_value=null",
    "rollout.groups_per_step=4",
    "rollout.group_size=4",
    "rollout.dynamic_sampling=off",
    "engine.max_running_requests=16",
    "eval.prompts=8",
    "eval.every=3",
    "checkpoint.every=2",
    "cluster.stop_timeout_s=5",
    "algorithm.preset=grpo",  # with a reference model
    "reward.components=[{name: sorting, correctness: true}, {name: sorting_format}]",
)
REFILL = (
    *TINY,
    "rollout.dynamic_sampling=refill",
    "rollout.oversample=1.5",
    "reward.workers=1",
    "reward.components=[{name: 'tests.unit.rollout_hooks:even_count_slowly', correctness: true}, "
    "{name: sorting_format}]",
)
STEP_S = 0.5
"""About how long a step with REFILL takes at least: 4 groups x 1.5 x 4 samples x 0.02 s."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("inputs"), prompts=8, eval_prompts=8, sft_prompts=64)


def uninterrupted(folder: Path, inputs: Path, *words: str) -> Path:
    finished = train(folder, inputs, *words)
    assert finished.code == 0, finished.output
    return folder


def assert_same_run(folder: Path, expected: Path) -> None:
    """Metrics, ledger and dumps are those of the run that nothing happened to, and no prompt is lost or doubled."""
    assert exact_metrics(folder) == exact_metrics(expected)
    assert (folder / "ledger.jsonl").read_text() == (expected / "ledger.jsonl").read_text()
    for kind in ("rollouts", "eval"):
        names = [sorted(path.name for path in (run / kind).iterdir()) for run in (folder, expected)]
        assert names[0] == names[1]
    assert audit_run(folder).problems == []


def test_term_in_the_warm_up_and_dead_processes_change_nothing(tmp_path: Path, inputs: Path) -> None:
    words = ("steps=4", *TINY, "reward.workers=1")
    expected = uninterrupted(tmp_path / "whole", inputs, *words)
    folder = tmp_path / "killed"
    with LiveRun(folder, inputs, *words) as run:
        run.wait_until("the warm-up", lambda: len(rows(folder)) >= 3)
        run.send_to_all(signal.SIGTERM)
        assert run.end() == 75, run.output
    with LiveRun(folder, inputs, *words, "--resume") as run:
        run.wait_for_step(1)
        run.send(signal.SIGKILL, "engine")
        run.send(signal.SIGKILL, "reward worker")
        run.wait_for_step(3)
        run.send(signal.SIGKILL, "controller")
        assert run.end() == 1, run.output
        assert "controller-0 was ended by SIGKILL" in run.output
    assert "starting it again" in (folder / "logs" / "engine-0.log").read_text()
    resumed = train(folder, inputs, *words, "--resume")
    assert resumed.code == 0, resumed.output
    assert_same_run(folder, expected)
    # Eight prompts, four a step: the run crossed the end of an epoch, and each prompt was trained on once in either.
    whole = {"trained": 8, "filtered": 0, "rejected": 0, "pending": 0}
    assert audit_run(folder).epochs == [whole, whole]


@dataclass(frozen=True)
class Kill:
    """SIGKILL to one process, within about one step of the moment when `step` is written down."""

    role: str
    rank: int
    step: int
    said: str | None
    """What the launcher says of it when the run ends; None: the run goes on."""
    while_saving: bool = False

    def carry_out(self, run: LiveRun, dice: random.Random) -> str:
        """Returns what the run was at."""
        run.wait_for_step(self.step)
        if self.while_saving:
            run.wait_until("a save", lambda: run.is_saving)
        else:
            time.sleep(dice.uniform(0.0, STEP_S))
        doing = run.doing
        run.send(signal.SIGKILL, self.role, self.rank)
        return doing


KILLS = (
    (Kill("reward worker", 0, 1, None), Kill("trainer", 0, 2, "trainer")),
    (Kill("controller", 0, 3, "controller-0 was ended by SIGKILL"),),
    (Kill("trainer", 0, 5, "trainer", while_saving=True),),
    (Kill("engine", 0, 5, None), Kill("trainer", 1, 6, "trainer")),
    (Kill("launcher", 0, 7, ""),),
    (Kill("supervisor", 0, 8, "engine-0 was ended by SIGKILL"),),
)
"""By start of the run; the last of each ends it. Steps are left behind the last one, so that no run is over before."""


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [20])
def test_a_run_that_is_killed_again_and_again_is_the_run_that_was_not(tmp_path: Path, inputs: Path, seed: int) -> None:
    """Twelve steps with groups that are filtered and sampled ahead, over several epochs of eight prompts.

    With -s it shows a table of the kills.
    """
    words, folder, dice = ("steps=12", *REFILL), tmp_path / "killed", random.Random(seed)
    expected = uninterrupted(tmp_path / "whole", inputs, *words)
    for kills in KILLS:
        began, told = time.monotonic(), []
        with LiveRun(folder, inputs, *words, "--resume") as run:
            for kill in kills:
                told.append(f"{kill.role} {kill.rank} while {kill.carry_out(run, dice)}")
            code = run.end()
            print(f"{time.monotonic() - began:6.1f} s to exit code {code}: kill -9 of {', then '.join(told)}")
            assert code == (-9 if kills[-1].role == "launcher" else 1), run.output
            assert (kills[-1].said or "") in run.output
    resumed = train(folder, inputs, *words, "--resume")
    assert resumed.code == 0, resumed.output
    assert_same_run(folder, expected)
    assert len(audit_run(folder).epochs) >= 6


@pytest.mark.slow
def test_a_run_that_is_asked_to_stop_at_any_time_is_the_run_that_was_not(tmp_path: Path, inputs: Path) -> None:
    """TERM to the launcher while ranks start and while rollouts are awaited (the engine stands still); then to all."""
    words, folder, dice = ("steps=12", *REFILL, "checkpoint.every=0"), tmp_path / "stopped", random.Random(21)
    expected = uninterrupted(tmp_path / "whole", inputs, *words)
    with LiveRun(folder, inputs, *words) as run:
        run.pid("trainer", 1)
        time.sleep(dice.uniform(0.0, 4.0))
        run.send(signal.SIGTERM, "launcher")
        assert run.end() == 75, run.output
    with LiveRun(folder, inputs, *words, "--resume") as run:
        run.wait_for_step(2)
        run.send(signal.SIGSTOP, "engine")
        time.sleep(2.0)
        run.send(signal.SIGTERM, "launcher")
        run.wait_until("a checkpoint", lambda: any((folder / "checkpoints").glob("step-00000[23]")))
        assert run.end() == 75, run.output
    with LiveRun(folder, inputs, *words, "--resume") as run:
        run.wait_for_step(4)
        time.sleep(dice.uniform(0.0, STEP_S))
        run.send_to_all(signal.SIGTERM)
        assert run.end() == 75, run.output
    resumed = train(folder, inputs, *words, "--resume")
    assert resumed.code == 0, resumed.output
    assert_same_run(folder, expected)


@pytest.mark.slow
def test_an_engine_that_dies_too_often_ends_the_run_which_names_it(tmp_path: Path, inputs: Path) -> None:
    folder = tmp_path / "run"
    with LiveRun(folder, inputs, "steps=9", *TINY, "cluster.max_engine_restarts=0") as run:
        run.wait_for_step(1)
        run.send(signal.SIGKILL, "engine")
        assert run.end() == 1
        assert f"error: engine-0 failed with exit code 1; log {folder}/logs/engine-0.log" in run.output
        assert "the engine was ended by SIGKILL" in run.output
        assert "cluster.max_engine_restarts" in run.output


@pytest.mark.slow
def test_a_run_goes_on_with_the_engine_that_serves_when_the_other_one_never_comes_up(
    tmp_path: Path, inputs: Path
) -> None:
    folder, words = tmp_path / "run", ("engine.replicas=2", "cluster.max_engine_restarts=0")
    with LiveRun(folder, inputs, "steps=2", *TINY, *words) as run:
        run.send(signal.SIGKILL, "engine", 1)
        assert run.end() == 0, run.output
    assert "before it served; it is started again when another" in (folder / "logs" / "engine-1.log").read_text()
    assert re.search(r"WARNING engine http://\S+ is out \(1 of 2 engines serve\)", run.output), run.output
    serving = [row["system/engines_serving"] for row in rows(folder) if "system/engines_serving" in row]
    assert serving == [1.0, 1.0]


@pytest.mark.slow
def test_an_engine_that_is_silent_is_replaced_and_the_run_is_the_one_that_it_was_to_be(
    tmp_path: Path, inputs: Path
) -> None:
    """It is alive and answers nothing: while sampling, and while weights are published."""
    words = ("steps=6", *REFILL)
    expected = uninterrupted(tmp_path / "whole", inputs, *words)
    folder = tmp_path / "stopped"
    with LiveRun(folder, inputs, *words, "engine.silent_timeout_s=10") as run:
        run.wait_for_step(1)
        stopped = run.pid("engine")
        run.send(signal.SIGSTOP, "engine")
        run.wait_until("another engine", lambda: run.pid("engine") != stopped)
        run.wait_for_step(3)
        run.wait_until("new weights", lambda: any((folder / "weights").glob("v00000[45]")))
        run.send(signal.SIGSTOP, "engine")
        assert run.end() == 0, run.output
    said = (folder / "logs" / "engine-0.log").read_text()
    assert said.count("the engine was silent for 10 s (engine.silent_timeout_s); starting it again") == 2
    assert_same_run(folder, expected)


@pytest.mark.slow
def test_a_run_directory_that_is_moved_away_ends_the_run_which_goes_on_when_it_is_back(
    tmp_path: Path, inputs: Path
) -> None:
    folder, away, words = tmp_path / "run", tmp_path / "away", ("steps=6", *REFILL)
    expected = uninterrupted(tmp_path / "whole", inputs, *words)
    with LiveRun(folder, inputs, *words) as run:
        run.wait_until("a checkpoint", lambda: (folder / "checkpoints" / "step-000002").exists())
        folder.rename(away)
        assert run.process.wait(60) == 1
        assert f"error: run_dir={folder} was moved, renamed or removed while the run went on" in run.output
        assert "Traceback" not in run.output
        run.end()  # no process is left
    shutil.rmtree(folder, ignore_errors=True)  # what was written to the old path at that moment
    away.rename(folder)
    resumed = train(folder, inputs, *words, "--resume")
    assert resumed.code == 0, resumed.output
    assert_same_run(folder, expected)


@pytest.mark.slow
def test_a_controller_that_is_silent_ends_the_run_at_the_deadline_with_its_log(tmp_path: Path, inputs: Path) -> None:
    folder = tmp_path / "run"
    with LiveRun(folder, inputs, "steps=9", *REFILL, "cluster.controller_timeout_s=10") as run:
        run.wait_for_step(1)
        run.send(signal.SIGSTOP, "controller")
        assert run.end() == 1
        assert re.search(r"the controller at http://\S+ does not answer", run.output), run.output
        assert f"look at {folder}/logs/controller-0.log" in run.output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("largest_file", "complaint"),
    [
        (1_000_000, r"could not write \S+/weights/\S+: .*File too large"),
        (2_000_000, r"File too large: '\S+/report.html': make room there"),
    ],
)
def test_a_disk_that_takes_no_more_ends_the_run_with_one_message_and_with_room_it_goes_on(
    tmp_path: Path, inputs: Path, largest_file: int, complaint: str
) -> None:
    """A limit on the size of files plays the full disk, here for weights and for the report."""
    folder, words = tmp_path / "run", ("steps=1", *TINY)
    stopped = train(folder, inputs, *words, largest_file=largest_file)
    assert stopped.code == 1
    assert re.search(complaint, stopped.output), stopped.output
    assert "Traceback" not in stopped.output
    resumed = train(folder, inputs, *words, "--resume")
    assert resumed.code == 0, resumed.output


@pytest.mark.slow
def test_what_does_not_fit_the_earlier_run_is_refused_and_an_older_checkpoint_can_be_chosen(
    tmp_path: Path, inputs: Path
) -> None:
    folder, words = uninterrupted(tmp_path / "run", inputs, "steps=4", *TINY), ("steps=4", *TINY)
    before = exact_metrics(folder)

    def refused(*more: str, code: int = 1) -> str:
        answer = train(folder, inputs, *words, "--resume", *more)
        assert answer.code == code, answer.output
        assert "Traceback" not in answer.output
        assert exact_metrics(folder) == before
        return answer.output

    assert "optimizer.lr: 0.0003 -> 0.5" in refused("optimizer.lr=0.5", code=2)
    other = make_inputs(tmp_path / "other", seed=2, prompts=8, eval_prompts=8, sft_prompts=64)
    logs = [path.stat().st_size for path in sorted((folder / "logs").iterdir())]
    for recorded in (inputs, other):  # the file that config.yaml names proves nothing
        config = (folder / "config.yaml").read_text()
        (folder / "config.yaml").write_text(config.replace(f"{inputs}/train.jsonl", f"{recorded}/train.jsonl"))
        assert "belongs to other prompts or another order" in refused(f"data.prompts={other}/train.jsonl", code=2)
        (folder / "config.yaml").write_text(config)
    assert logs == [path.stat().st_size for path in sorted((folder / "logs").iterdir())]  # nothing was started
    damaged = next((folder / "checkpoints" / "step-000004" / "policy").glob("*.distcp"))
    whole = damaged.read_bytes()
    for content, state in (
        (whole[:-1], "bytes instead of"),
        (whole[:-1] + bytes([whole[-1] ^ 1]), "right size but not"),
    ):
        damaged.write_bytes(content)
        answer = refused("steps=5")
        assert f"{damaged} has " in answer
        assert state in answer
        assert "--resume-from 2" in answer
    assert "no checkpoint of step 3; it has those of: 2, 4" in refused("--resume-from=3", code=2)
    nowhere = train(tmp_path / "nowhere" / "run", inputs, *words, "--resume-from=3")
    assert "has no checkpoint of step 3; it has none" in nowhere.output
    assert (nowhere.code, (tmp_path / "nowhere").exists()) == (2, False)
    resumed = train(folder, inputs, *words, "--resume-from", "2")
    assert resumed.code == 0, resumed.output
    assert exact_metrics(folder) == before
    shutil.rmtree(folder)
