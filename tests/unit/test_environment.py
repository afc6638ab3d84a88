"""Environments live in processes of their own: their answers arrive, and whatever they do ends their sample only."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.config import ConfigError
from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.data import PromptRecord
from megatron_rl.rollout.environment import EnvironmentFailed, Step, load_environment, role_of
from megatron_rl.rollout.episodes import EnvironmentPool, Episode

HOOKS = "tests.unit.environment_hooks"
RECORD = PromptRecord("r1", ({"role": "user", "content": "go"},), extra={"k": 1})


def rollout(name: str, *, workers: int = 1, timeout_s: float = 30.0, **args: Any) -> RolloutConfig:
    return RolloutConfig(
        environment=f"{HOOKS}:{name}",
        environment_args=args,
        environment_workers=workers,
        environment_timeout_s=timeout_s,
    )


def test_calls_reach_the_samples_own_environment():
    async def talk() -> list[Any]:
        async with EnvironmentPool(rollout("Counts", workers=2, last=3, opening="hello", reward=0.25)) as pool:
            first, second = pool.episode(RECORD), pool.episode(RECORD)
            opened = await asyncio.gather(first.reset(), second.reset())
            steps = [await first.step("a"), await second.step("b"), await first.step("ç\n"), await first.step("d")]
            assert first._place is not second._place
            for episode in (first, second):
                episode.end()
            return [*opened, *steps]

    assert asyncio.run(talk()) == [
        "hello r1",
        "hello r1",
        Step("1:a", False, 0.25),
        Step("1:b", False, 0.25),
        Step("2:ç\n", False, 0.25),
        Step("3:d", True, 0.25),
    ]


@pytest.mark.parametrize(
    ("said", "complaint"),
    [
        ("raise luck", r"step raised ValueError: no luck \(.*environment_hooks.py:\d+\)"),
        ("exit", "step raised SystemExit: 3"),
        ("pair", r"step returned \('a', True\); it must be \(observation, done, reward\)"),
        ("number", "an observation of type int"),
        ("nan", "reward=nan"),
        ("long", "1000000 characters"),
        ("surrogate", "cannot be sent on"),
        ("die", "its process ended twice during one call: signal SIGKILL"),
        ("hang", r"step did not answer within 0.5 s \(rollout.environment_timeout_s\)"),
    ],
)
def test_what_one_environment_does_is_its_own_failure_and_the_others_go_on(said: str, complaint: str):
    async def talk() -> None:
        async with EnvironmentPool(rollout("Faulty", timeout_s=0.5 if said == "hang" else 30.0)) as pool:
            assert pool.role == "tool"
            other, faulty = pool.episode(RECORD), pool.episode(RECORD)
            await other.reset()
            assert (await other.step("print")).observation == "1:print"
            await faulty.reset()
            with pytest.raises(EnvironmentFailed, match=complaint):
                await faulty.step(said)
            faulty.end()
            assert (await other.step("b")).observation == "2:b"

    asyncio.run(talk())


def test_a_hanging_call_blocks_neither_the_loop_nor_environments_in_other_processes():
    async def talk() -> None:
        async with EnvironmentPool(rollout("Faulty", workers=2, timeout_s=20)) as pool:
            hanging, other = pool.episode(RECORD), pool.episode(RECORD)
            await asyncio.gather(hanging.reset(), other.reset())
            stuck = asyncio.ensure_future(hanging.step("hang"))
            for number in range(20):
                assert (await other.step("x")).observation == f"{number + 1}:x"
            assert not stuck.done()
            stuck.cancel()

    asyncio.run(talk())


def test_a_process_that_died_costs_no_sample(tmp_path: Path):
    async def talk() -> None:
        async with EnvironmentPool(rollout("DiesOnce", marker=str(tmp_path / "marker"))) as pool:
            episode = pool.episode(RECORD)
            await episode.reset()
            assert (await episode.step("a")).observation == "1:a"
            assert (await episode.step("die once")).observation == "2:die once"

    asyncio.run(talk())
    assert (tmp_path / "marker").exists()


def test_an_environment_that_cannot_be_repeated_fails_when_its_process_is_lost():
    async def talk() -> None:
        async with EnvironmentPool(rollout("Moody", timeout_s=0.5)) as pool:
            lost, hanging = pool.episode(RECORD), pool.episode(RECORD)
            await lost.reset()
            await lost.step("a")
            await hanging.reset()
            with pytest.raises(EnvironmentFailed, match="did not answer within"):
                await hanging.step("hang")
            with pytest.raises(EnvironmentFailed, match="answered otherwise"):
                await lost.step("b")

    asyncio.run(talk())


def test_a_caller_that_is_cancelled_leaves_its_answer_to_nobody_else():
    async def asked(episode: Episode, text: str) -> None:
        await episode.step(text)

    async def talk() -> None:
        async with EnvironmentPool(rollout("Counts")) as pool:
            episode, other = pool.episode(RECORD), pool.episode(RECORD)
            await asyncio.gather(episode.reset(), other.reset())
            for _ in range(5):
                task = asyncio.ensure_future(asked(episode, "gone"))
                await asyncio.sleep(0)  # it has begun
                await asyncio.sleep(0)
                task.cancel()
            assert (await other.step("mine")).observation == "1:mine"

    asyncio.run(talk())


@pytest.mark.parametrize("turns_of_the_loop", range(4))
def test_a_conversation_that_is_cancelled_leaves_no_environment_behind(turns_of_the_loop: int):
    async def talk() -> str:
        async with EnvironmentPool(rollout("Counted")) as pool:
            episodes = [pool.episode(RECORD) for _ in range(3)]
            calls = [asyncio.ensure_future(episode.reset()) for episode in episodes]
            for _ in range(turns_of_the_loop):  # none has begun, or the first one waits for its answer
                await asyncio.sleep(0)
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
            for episode in episodes:
                episode.end()
            left = pool.episode(RECORD)
            await left.reset()
            return (await left.step("?")).observation

    assert asyncio.run(talk()) == "1"


@pytest.mark.parametrize(
    ("name", "args", "complaint"),
    [
        ("nowhere:Class", {}, "module 'nowhere' cannot be imported .ModuleNotFoundError"),
        (f"{HOOKS}:Missing", {}, "has no 'Missing'"),
        (f"{HOOKS}:NOT_A_CLASS", {}, "has a int, not a class, 'NOT_A_CLASS'"),
        (f"{HOOKS}:Counts", {"lats": 1}, r"Counts\(last.*cannot be called with rollout.environment_args .*lats"),
        (f"{HOOKS}:WithoutStep", {}, "needs a plain method step"),
        (f"{HOOKS}:WithAsyncStep", {}, "needs a plain method step"),
        (f"{HOOKS}:WithTwoArguments", {}, "step.*cannot be called with one argument"),
    ],
)
def test_what_is_no_environment_is_refused_with_the_reason(name: str, args: dict[str, Any], complaint: str):
    with pytest.raises(ConfigError, match=complaint):
        load_environment(name, args)


def test_a_process_that_cannot_load_the_class_says_why():
    async def start() -> None:
        async with EnvironmentPool(RolloutConfig(environment="nowhere:Class")):
            pass

    with pytest.raises(ConfigError, match="module 'nowhere' cannot be imported"):
        asyncio.run(start())


def test_the_role_of_messages_is_the_classes_own():
    assert role_of(load_environment(f"{HOOKS}:Faulty", {})) == "tool"
    assert role_of(load_environment(f"{HOOKS}:Counts", {})) == "user"
