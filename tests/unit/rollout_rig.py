"""A controller in a thread of the test process, and what it needs: prompts and a configuration. Holds no tests."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.config import Config, dump, validate
from megatron_rl.rollout.controller import serve
from megatron_rl.rollout.endpoint import controller_file
from megatron_rl.rollout.pull import ControllerClient
from megatron_rl.rollout.sample import Group, Sample
from megatron_rl.rollout.wire import decode, unpack_groups

ROOT = Path(__file__).resolve().parents[2]
ENV = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
HOOK = "tests.unit.rollout_hooks:even_count"


def write_prompts(path: Path, count: int, stem: str = "p") -> Path:
    """`count` prompts of two digits each."""
    lines = [{"id": f"{stem}{i}", "prompt": f"{i:02d}", "answer": str(i), "source": f"s{i % 2}"} for i in range(count)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def config(run_dir: Path, model: Path, urls: list[str], **sections: dict[str, Any]) -> Config:
    """A small run; `sections` are merged into it key by key, other names are keys at the top."""
    run_dir.mkdir(parents=True, exist_ok=True)
    values: dict[str, Any] = {
        "run_dir": str(run_dir),
        "seed": 3,
        "steps": 4,
        "deterministic": True,
        "model": {"path": str(model), "dtype": "float32"},
        "data": {"prompts": str(write_prompts(run_dir / "prompts.jsonl", 40))},
        "engine": {"urls": urls},
        "reward": {"components": [{"name": HOOK, "correctness": True}], "workers": 1},
        "rollout": {
            "groups_per_step": 4,
            "group_size": 4,
            "max_prompt_tokens": 40,
            "max_response_tokens": 8,
            "request_timeout_s": 60,
            "step_timeout_s": 120,
            "dynamic_sampling": "refill",
        },
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section} if isinstance(section, dict) else section
    return validate(values)


@contextmanager
def deterministic_engine(folder: Path, model: Path) -> Iterator[str]:
    """URL of an embedded engine that serves `model` while the block runs."""
    endpoint = folder / "engine.json"
    words = ["--model", str(model), "--endpoint-file", str(endpoint), "--deterministic"]
    words += ["--max-running-requests", "32", "--context-length", "64"]
    with open(folder / "log", "wb") as log:
        argv = [sys.executable, "-m", "megatron_rl.engines.serve", *words]
        process = subprocess.Popen(argv, env=ENV, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 120
        while not endpoint.exists():
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline, "the engine did not start"
            time.sleep(0.05)
        yield json.loads(endpoint.read_text())["url"]
    finally:
        for _ in range(2):  # a supervisor passes on what the engine has got itself
            process.send_signal(signal.SIGTERM)
        process.wait(30)
    assert "Traceback" not in (folder / "log").read_text()


@contextmanager
def running_controller(cfg: Config) -> Iterator[None]:
    """Serve `cfg` while the block runs; raises what the controller raised."""
    shutdown: asyncio.Event | None = None
    loop: asyncio.AbstractEventLoop | None = None
    failures: list[BaseException] = []
    began = threading.Event()

    async def main() -> None:
        nonlocal shutdown, loop
        shutdown, loop = asyncio.Event(), asyncio.get_running_loop()
        began.set()
        await serve(cfg, "127.0.0.1", shutdown)

    def target() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=target, name="controller")
    thread.start()
    assert began.wait(10)
    try:
        deadline = time.monotonic() + 60
        while not controller_file(cfg.run_dir).exists() and thread.is_alive():
            assert time.monotonic() < deadline, "the controller did not publish itself"
            time.sleep(0.01)
        if thread.is_alive():
            yield
    finally:
        assert loop is not None
        assert shutdown is not None
        if thread.is_alive():
            loop.call_soon_threadsafe(shutdown.set)
        thread.join(30)
        assert not thread.is_alive(), "the controller did not end"
    if failures:
        raise failures[0]


def saved_groups(client: ControllerClient) -> tuple[list[Group], list[int]]:
    """What a checkpoint would hold now: groups with all that is known of their tokens, and ids of unfinished ones."""
    arrays, values = decode(client.get_state())
    return unpack_groups(arrays, values["groups"]), values["state"]["pool"]["partial"]


def log_probs_of(model: Path, sample: Sample) -> np.ndarray:
    """float32 [R], the response's log-probs under these weights, in one pass."""
    import torch
    from transformers import AutoModelForCausalLM

    tokens = torch.from_numpy(np.concatenate([sample.prompt_tokens, sample.response_tokens]))
    with torch.inference_mode():
        logits = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(tokens[None]).logits[0, :-1]
    found = torch.log_softmax(logits / sample.temperature, -1).gather(-1, tokens[1:, None])[:, 0]
    return found[sample.prompt_length - 1 :].numpy()


def start_process(cfg: Config) -> subprocess.Popen[str]:
    """The controller in a process of its own."""
    path = Path(cfg.run_dir) / "config.yaml"
    path.write_text(dump(cfg))
    argv = [sys.executable, "-m", "megatron_rl.cli", "rollout", "--config", str(path)]
    return subprocess.Popen(argv, env=ENV, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
