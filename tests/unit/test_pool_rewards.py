"""The reward pool: results in order, deadlines, dead workers, secrets, and no process left behind."""

import asyncio
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megatron_rl.config.reward import RewardComponent, RewardConfig
from megatron_rl.data import PromptRecord
from megatron_rl.rewards import RewardError, RewardPool
from megatron_rl.rewards.pool_worker import worker_environment

HOOKS = f"{__package__}.reward_hooks"
RECORD = PromptRecord("p-7", ({"role": "user", "content": "x"},), answer="1234", extra={"numbers": [1, 2]})


def config(*names, workers=1, timeout_s=30.0, **settings):
    components = [RewardComponent(name=name) for name in names]
    return RewardConfig(components=components, workers=workers, timeout_s=timeout_s, **settings)


def items(*responses):
    return [(RECORD, response) for response in responses]


def run(main):
    return asyncio.run(asyncio.wait_for(main, 120))


def is_running(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until_gone(pids, deadline_s=10.0):
    end = time.monotonic() + deadline_s
    while any(map(is_running, pids)):
        assert time.monotonic() < end, f"still running after {deadline_s} s: {[pid for pid in pids if is_running(pid)]}"
        time.sleep(0.02)


async def score(cfg, responses):
    async with RewardPool(cfg) as pool:
        return await pool.score(items(*responses))


@pytest.mark.parametrize("workers", [0, 2])
def test_results_come_in_the_order_of_the_items(workers):
    responses = [f"{n:04d}" if n % 2 else "x" * n for n in range(150)]
    results = run(score(config("sorting", "sorting_format", workers=workers), [*responses, "1234"]))
    assert [result.components["sorting_format"] for result in results[:-1]] == [
        float(len(response) == 4 and response.isdigit()) for response in responses
    ]
    assert results[-1].total == 2.0


def test_records_reach_workers_whole():
    async def main():
        async with RewardPool(config("countdown", "exact")) as pool:
            record = PromptRecord("c", RECORD.messages, answer="3", extra={"numbers": [1, 2]})
            return await pool.score([(record, "<answer>1+2</answer>"), (record, " 3 ")])

    assert [result.components for result in run(main())] == [
        {"countdown": 1.0, "exact": 0.0},
        {"countdown": 0.0, "exact": 1.0},
    ]


@pytest.mark.parametrize("hostile", ["hang", "spin", "child", "own-session"])
def test_a_verifier_past_its_deadline_is_killed_and_costs_one_item(hostile):
    async def main():
        async with RewardPool(config(f"{HOOKS}:obey", timeout_s=1.0)) as pool:
            (before,) = await pool.score(items("pid"))
            family = [int(before.total)]
            scoring = asyncio.create_task(pool.score(items("ok", hostile, "ok", "ok")))
            while (
                hostile in ("child", "own-session") and not psutil.Process(family[0]).children() and not scoring.done()
            ):
                await asyncio.sleep(0.01)
            family += [child.pid for child in psutil.Process(family[0]).children(recursive=True)]
            results = await scoring
            wait_until_gone(family)
            return results, len(family)

    results, family = run(main())
    assert [result.total for result in results if math.isfinite(result.total)] == [0.5] * 3
    assert math.isnan(results[1].total)
    assert math.isnan(results[1].correctness)
    assert "timeout: no answer after reward.timeout_s=1 s" in results[1].errors[f"{HOOKS}:obey"]
    assert family == (2 if hostile in ("child", "own-session") else 1)


def test_an_item_that_ends_two_workers_is_given_up_and_costs_no_other():
    results = run(score(config(f"{HOOKS}:obey"), ["ok", "die", "ok", "die"]))
    assert [math.isfinite(result.total) for result in results] == [True, False, True, False]
    assert "the worker process died (exit status 3)" in results[1].errors[f"{HOOKS}:obey"]


def test_a_worker_that_was_killed_costs_nothing(tmp_path):
    responses = ["ok", f"die_once {tmp_path}/mark", "ok", "1234"]
    results = run(score(config(f"{HOOKS}:obey", "exact"), responses))
    assert [result.total for result in results] == [0.5, 0.5, 0.5, 1.5]


def test_a_verifier_that_raises_is_logged_a_few_times_and_counted(caplog):
    results = run(score(config(f"{HOOKS}:obey", "exact"), ["raise key", "1234"] + ["nan"] * 20))
    assert math.isnan(results[0].total)
    assert results[0].components["exact"] == 0.0
    assert results[1].total == 1.5
    lines = [record.getMessage() for record in caplog.records]
    assert "prompt 'p-7'" in lines[0]
    assert "raised LookupError: no key" in lines[0]
    assert "tests.unit.reward_hooks:obey returned nan" in lines[1]
    assert "only counted" in lines[-1]
    assert len(lines) == 6


@pytest.mark.parametrize(("workers", "name"), [(0, "countdown"), (1, f"{HOOKS}:obey")])
def test_on_error_fail_ends_the_call_with_the_reason(workers, name):
    cfg = config(name, workers=workers, on_error="fail")
    broken = PromptRecord("no puzzle", RECORD.messages)

    async def main():
        async with RewardPool(cfg) as pool:
            await pool.score([(broken, "raise")])

    with pytest.raises(RewardError, match=r"prompt 'no puzzle': .* raised .*reward.on_error=mask"):
        run(main())


def test_what_a_verifier_prints_does_not_disturb_the_answers(capfd):
    results = run(score(config(f"{HOOKS}:obey"), ["print", "ok"]))
    assert [result.total for result in results] == [0.5, 0.5]
    assert "noise on standard output" in capfd.readouterr().err


def test_calls_at_the_same_time_share_all_workers():
    async def main():
        async with RewardPool(config(f"{HOOKS}:obey", workers=2)) as pool:
            return await asyncio.gather(*(pool.score(items(*["pid"] * 40)) for _ in range(3)))

    pids = {result.total for results in run(main()) for result in results}
    assert len(pids) == 2


@pytest.mark.parametrize(
    ("name", "expected"),
    [("no_such_module:f", "cannot be imported"), (f"{HOOKS}:nothing", "has no 'nothing'")],
)
def test_a_hook_that_cannot_be_loaded_fails_at_the_start_and_leaves_nothing(name, expected):
    children = set(psutil.Process().children())
    with pytest.raises(RewardError, match=expected):
        run(score(config(name, workers=2), ["x"]))
    assert set(psutil.Process().children()) <= children


def test_workers_import_only_what_their_verifiers_need():
    modules = ["torch", "transformers", "numpy", "pydantic", "tokenizers", "sympy", "asyncio"]
    results = run(score(config(f"{HOOKS}:obey"), [f"module {name}" for name in modules]))
    assert [name for name, result in zip(modules, results, strict=True) if result.total] == []


def test_workers_see_no_secrets(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("JUDGE_URL", "http://judge")
    names = ["WANDB_API_KEY", "HF_TOKEN", "JUDGE_URL", "PATH"]
    results = run(score(config(f"{HOOKS}:obey"), [f"env {name}" for name in names]))
    assert [result.total for result in results] == [0, 0, 0, 1]


def test_the_environment_of_a_worker_finds_the_modules_of_its_parent():
    environment = worker_environment({"LC_ALL": "C", "API_KEY": "x", "PYTHONPATH": "/elsewhere"})
    assert environment["PYTHONPATH"].split(os.pathsep) == [entry or os.getcwd() for entry in sys.path]
    assert environment["LC_ALL"] == "C"
    assert "API_KEY" not in environment


def test_a_closed_pool_ends_its_workers_and_the_calls_that_wait():
    async def main():
        pool = RewardPool(config(f"{HOOKS}:obey", workers=2))
        await pool.start()
        pids = [int(result.total) for result in await pool.score(items(*["pid"] * 64))]
        waiting = asyncio.create_task(pool.score(items("hang", "hang", "hang")))
        await asyncio.sleep(0.2)
        await pool.close()
        with pytest.raises(RewardError, match="pool is closed"):
            await waiting
        with pytest.raises(RewardError, match="pool is closed"):
            await pool.score(items("ok"))
        await pool.close()
        return set(pids)

    wait_until_gone(run(main()))


PARENT = """
import asyncio, os, sys
from megatron_rl.config.reward import RewardComponent, RewardConfig
from megatron_rl.data import PromptRecord
from megatron_rl.rewards import RewardPool

async def main():
    hook = sys.argv[1]
    pool = RewardPool(RewardConfig(components=[RewardComponent(name=hook)], workers=2, timeout_s=300))
    await pool.start()
    record = PromptRecord("p", ({"role": "user", "content": "x"},))
    scoring = asyncio.create_task(pool.score([(record, "spin")]))  # one worker computes, one waits for jobs
    await asyncio.sleep(0.3)
    print(*(worker._process.pid for worker in pool._workers), flush=True)
    await scoring

asyncio.run(main())
"""


def test_workers_do_not_outlive_a_killed_controller():
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", PARENT, f"{HOOKS}:obey"]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) as parent:
        try:
            assert parent.stdout is not None
            pids = [int(pid) for pid in parent.stdout.readline().split()]
            assert len(pids) == 2
            assert all(map(is_running, pids))
        finally:
            parent.send_signal(signal.SIGKILL)
    wait_until_gone(pids)
