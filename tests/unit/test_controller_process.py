"""How a controller ends that never came to ask an engine."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from megatron_rl.rollout.controller import serve
from megatron_rl.rollout.endpoint import controller_file
from tests.tiny import tiny_model
from tests.unit.rollout_rig import config, start_process


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "m", vocab_size=64, layers=1, max_position_embeddings=64)


def test_a_controller_that_waits_for_its_engines_ends_when_it_is_asked_to(model, tmp_path):
    cfg = config(tmp_path, model, [], engine={"ready_timeout_s": 600})

    async def main() -> None:
        shutdown = asyncio.Event()
        asyncio.get_running_loop().call_later(0.2, shutdown.set)
        await asyncio.wait_for(serve(cfg, "127.0.0.1", shutdown), timeout=60)

    asyncio.run(main())
    assert not controller_file(tmp_path).exists()


def test_a_prompt_that_is_too_long_stops_the_process_at_once_with_file_and_line(model, tmp_path):
    cfg = config(tmp_path, model, ["http://127.0.0.1:9"], rollout={"max_prompt_tokens": 5})
    process = start_process(cfg)
    _, errors = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "prompts.jsonl:1: the prompt has" in errors
    assert "rollout.max_prompt_tokens=5" in errors
    assert not controller_file(tmp_path).exists()
