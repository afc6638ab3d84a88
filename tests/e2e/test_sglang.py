"""The circle with a real SGLang: the quickstart's run, its weights given to the server, each token with its version."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from megatron_rl.config.engine import KEY_FILE
from tests.contract.servers import NO_SGLANG, SGLANG

from .live import LiveRun
from .runs import FinishedRun, make_inputs, train
from .versions import Versions, kept_samples

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(not SGLANG.exists(), reason=NO_SGLANG)]
MARK = "MEGATRON_RL_TEST_MARK"
SHORT = (
    "engine.kind=sglang",
    f"engine.python={SGLANG}",
    "sft.max_steps=10",
    "sft.stop_value=null",
    "rollout.groups_per_step=8",
    "rollout.group_size=4",
    "rollout.dynamic_sampling=off",
    "eval.prompts=32",
    "eval.every=0",
    "checkpoint.every=1",
    "rollout.request_timeout_s=300",  # a server that is started again is waited for
    "rollout.step_timeout_s=600",
    "algorithm.preset=grpo",
    # So early only the format differs between the samples of a group.
    "reward.components=[{name: sorting, correctness: true}, {name: sorting_format}]",
)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("inputs"), prompts=256, eval_prompts=64, sft_prompts=256)


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A word in the environment of every process of a run: SGLang's give themselves other names."""
    monkeypatch.setenv(MARK, str(tmp_path))
    return str(tmp_path)


def marked(mark: str) -> list[str]:
    """The names of the processes that carry `mark`, this one not among them."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if int(entry.name) != os.getpid() and f"{MARK}={mark}\0".encode() in (entry / "environ").read_bytes():
                found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:80])
        except (OSError, ValueError):
            continue
    return found


def assert_trained(run: FinishedRun, steps: int) -> None:
    """All steps are there; the engine's log-probs are those of the weights that the trainer had just published."""
    assert [row["step"] for row in run.steps] == [*range(1, steps + 1)]
    assert [row["gap/max_abs"] for row in run.steps if row["gap/max_abs"] >= 1e-5] == []
    for step in range(steps):
        table = pq.read_table(run.folder / "rollouts" / f"step-{step + 1:06d}.parquet")
        assert table.num_rows == 8 * 4
        assert set(table["weight_version_first"].to_pylist()) == {step}
        assert set(table["weight_version_last"].to_pylist()) == {step}


def test_three_steps_agree_to_the_last_digits_and_leave_nothing_behind(tmp_path: Path, inputs: Path, mark: str) -> None:
    """Weights by a process group with the trainer, responses in segments."""
    words = ("engine.weight_transport=broadcast", "rollout.segment_tokens=3")
    run = train(tmp_path / "run", inputs, "steps=3", *SHORT, *words, timeout=900)
    assert run.code == 0, run.output
    assert_trained(run, 3)
    assert (run.folder / KEY_FILE).stat().st_mode & 0o777 == 0o600
    assert marked(mark) == []


@pytest.mark.slow
def test_shared_devices_and_kept_responses_mix_up_no_version(tmp_path: Path, inputs: Path, mark: str) -> None:
    """Turns as SGLang saw them; tokens of a response that went on under new weights have each the weights' version."""
    folder = tmp_path / "run"
    words = (
        "cluster.placement=colocated",
        "engine.weight_transport=ipc",
        "sft.data=null",  # a random model answers at random length
        "rollout.partial_rollouts=true",
        "rollout.oversample=2",
        "rollout.max_response_tokens=96",
        "rollout.segment_tokens=16",
        "checkpoint.keep_last=100",
        "optimizer.lr=1e-3",
        "reward.workers=1",
        "reward.components=[{name: 'tests.unit.rollout_hooks:even_count', correctness: true}]",
    )
    run = train(folder, inputs, "steps=4", *SHORT, *words, timeout=900)
    assert run.code == 0, run.output
    seen = re.findall(r'"POST /(\w+_memory_occupation) HTTP/1.1" 200', (folder / "logs" / "engine-0.log").read_text())
    turn = ["release_memory_occupation", *2 * ["resume_memory_occupation"]]  # for weights, then for the KV cache
    assert seen == [*turn, *4 * [*turn, *turn[:2]]]  # each step ends in a checkpoint, which borrows the KV cache
    mixed = [sample for sample in kept_samples(folder).values() if len(sample.spans) > 1]
    versions = Versions(folder, inputs / "model", tmp_path / "weights")
    assert max(versions.error(sample) for sample in mixed) < 1e-5
    assert min(versions.error(sample, older=1) for sample in mixed if sample.version_first) > 1e-3
    assert marked(mark) == []


@pytest.mark.slow
def test_a_killed_server_comes_back_with_the_published_weights(tmp_path: Path, inputs: Path, mark: str) -> None:
    with LiveRun(tmp_path / "run", inputs, "steps=3", *SHORT) as live:
        live.wait_for_step(1)
        live.send(signal.SIGKILL, "engine")
        run = FinishedRun(live.end(), live.output, tmp_path / "run")
    assert run.code == 0, run.output
    assert "starting it again" in (run.folder / "logs" / "engine-0.log").read_text()
    assert_trained(run, 3)
    assert marked(mark) == []
