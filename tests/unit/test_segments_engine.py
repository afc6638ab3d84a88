"""Responses in segments at a real engine: a short segment changes nothing but the number of requests."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from megatron_rl.rollout.client import Limits
from megatron_rl.rollout.connect import connect
from megatron_rl.rollout.protocol import SamplingSettings
from megatron_rl.rollout.sample import Group, group_name
from tests.tiny import tiny_model
from tests.unit.rollout_rig import deterministic_engine

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = SamplingSettings(temperature=1.0, max_new_tokens=24, stop_token_ids=(5,))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a deterministic engine."""
    folder = tmp_path_factory.mktemp("engine")
    model = tiny_model(folder / "m", vocab_size=64, layers=1, max_position_embeddings=64)
    with deterministic_engine(folder, model) as url:
        yield url


def groups() -> list[Group]:
    prompts = [np.array([3, 9, 4 + i], np.int64) for i in range(4)]
    return [Group.start(i, "p", p, 4, run_seed=1, version=0, temperature=1.0) for i, p in enumerate(prompts)]


def generated(engine: str, segment: int, suspend: bool = False, workers: int = 0) -> list[Group]:
    """Four groups; `suspend`: again and again, until nothing is left to suspend."""

    async def run() -> list[Group]:
        made = groups()
        limits = Limits(segment_tokens=segment, context_length=57)
        async with connect([engine], vocab_size=64, limits=limits, workers=workers) as client:
            while any(group.unfinished for group in made):
                tasks = [asyncio.create_task(client.generate(group.samples, SETTINGS)) for group in made]
                if suspend:
                    have = sum(s.response_length for group in made for s in group.samples)
                    while not all(task.done() for task in tasks):
                        await asyncio.sleep(0.005)
                        if sum(s.response_length for group in made for s in group.samples) > have + 20:
                            client.suspend([group_name(group.id) for group in made])
                await asyncio.gather(*tasks)
        return made

    return asyncio.run(run())


@pytest.mark.parametrize(("segment", "suspend", "workers"), [(3, False, 0), (5, True, 0), (4, True, 1)])
def test_segments_and_suspensions_give_the_bits_of_the_response_that_is_made_at_once(engine, segment, suspend, workers):
    whole = generated(engine, 100)
    parts = generated(engine, segment, suspend, workers)
    for group, other in zip(whole, parts, strict=True):
        for one, two in zip(group.samples, other.samples, strict=True):
            assert one.attempts == 1
            assert one.response_length <= segment or two.attempts > 1
            assert one.finish_reason == two.finish_reason
            np.testing.assert_array_equal(one.response_tokens, two.response_tokens)
            np.testing.assert_array_equal(one.log_probs, two.log_probs)
            assert one.spans == two.spans
