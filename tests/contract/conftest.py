"""Fixtures of the contract tests: one server for all of them, a deterministic one with an API key, reference models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.contract.servers import NO_SGLANG, SGLANG, Server, launch_embedded, launch_sglang, wait_until_ready
from tests.tiny import tiny_model

API_KEY = "contract-tests"
CONTEXT = 4096


@dataclass
class Reference:
    """The same model in transformers, run over whole sequences."""

    model: Any

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """float32 [T, V]."""
        with torch.inference_mode():
            return self.model(torch.tensor([tokens])).logits[0].float()

    def log_probs(self, prompt: list[int], output: list[int], temperature: float) -> np.ndarray:
        """log_softmax(logits / temperature) of the output tokens, float32 [R]."""
        tokens = prompt + output
        log_probs = torch.log_softmax(self.logits(tokens) / temperature, dim=-1)
        places = torch.arange(len(prompt) - 1, len(tokens) - 1)
        return log_probs[places, torch.tensor(output, dtype=torch.int64)].numpy()

    def prompt_before(self, token: int) -> list[int]:
        """The two tokens, of many pairs, after which `token` is the most probable by the widest margin."""
        best, pair = -torch.inf, [0, 0]
        vocabulary = torch.arange(self.model.config.vocab_size)
        for first in vocabulary[::10]:
            with torch.inference_mode():
                logits = self.model(torch.stack((first.expand_as(vocabulary), vocabulary), 1)).logits[:, -1]
            margin = logits[:, token] - logits.index_fill(1, torch.tensor([token]), -torch.inf).amax(1)
            if margin.max() > best:
                best, pair = float(margin.max()), [int(first), int(margin.argmax())]
        assert best > 0.01, "no pair of tokens makes it the most probable one"
        return pair

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """The `count` most probable continuations, one by one."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.logits(tokens)[-1].argmax()))
        return tokens[len(prompt) :]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two tiny Qwen3 models that differ in all weights."""
    folder = tmp_path_factory.mktemp("models")
    size = {"max_position_embeddings": CONTEXT}
    return tiny_model(folder / "a", seed=0, **size), tiny_model(folder / "b", seed=1, **size)


@pytest.fixture(scope="package")
def _servers(
    models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[list[Server]]:
    """Started together: most of a start is importing. A real SGLang only where it is installed and a test wants it."""
    folder = tmp_path_factory.mktemp("servers")
    options = ("--deterministic", "--context-length", "128", "--seed", "1")
    started = [
        launch_embedded(folder / "plain", *models, 4),
        launch_embedded(folder / "deterministic", *models, 16, *options, api_key=API_KEY),
    ]
    if SGLANG.exists() and any("sglang" in _parameters(item) for item in request.session.items):
        started.append(launch_sglang(folder / "sglang", *models, 4, CONTEXT))
    try:
        yield started
    finally:
        codes = [server.stop() for server in started]
    failed = [server.log.read_text() for server, code in zip(started, codes, strict=True) if code]
    assert not failed, "a server did not end cleanly:\n" + "\n".join(failed)


def _parameters(item: pytest.Item) -> list[Any]:
    return (
        list(item.callspec.params.values()) if isinstance(item, pytest.Function) and hasattr(item, "callspec") else []
    )


@pytest.fixture(scope="package", params=["embedded", "sglang"])
def running_server(request: pytest.FixtureRequest) -> Server:
    """One server of each kind for the whole suite, which starts on model a as version w0."""
    return server_of(request, 0 if request.param == "embedded" else 2)


def server_of(request: pytest.FixtureRequest, index: int) -> Server:
    """One of `_servers`, ready; skips without the real one."""
    if index == 2 and not SGLANG.exists():
        pytest.skip(NO_SGLANG)
    return wait_until_ready(request.getfixturevalue("_servers")[index])


@pytest.fixture
def server(running_server: Server) -> Iterator[Server]:
    """The server, idle, unpaused and on model a as version w0 before and after each test."""
    yield running_server
    _reset(running_server)


@pytest.fixture
def embedded_server(_servers: list[Server]) -> Iterator[Server]:
    """The embedded engine, likewise, for what only it does."""
    yield wait_until_ready(_servers[0])
    _reset(_servers[0])


def _reset(server: Server) -> None:
    server.ok("/abort_request", {"abort_all": True})
    server.ok("/continue_generation", {})
    server.wait_for_load("idle", lambda load: not load["num_running_reqs"] and not load["num_waiting_reqs"])
    server.call("/end_weight_update", {})
    if server.updated:  # a real SGLang may have loaded weights that it refused afterwards
        server.ok("/update_weights_from_disk", {"model_path": str(server.model), "weight_version": "w0"})
        server.updated = False


@pytest.fixture(scope="package")
def deterministic_server(_servers: list[Server]) -> Server:
    """An embedded engine with fixed kernel shapes, 128 tokens of context and an API key."""
    return wait_until_ready(_servers[1])


@pytest.fixture(scope="session")
def reference(models: tuple[Path, Path]) -> Reference:
    """Model a in transformers."""
    return _load(models[0])


@pytest.fixture(scope="session")
def other_reference(models: tuple[Path, Path]) -> Reference:
    """Model b in transformers."""
    return _load(models[1])


def _load(path: Path) -> Reference:
    from transformers import AutoModelForCausalLM

    return Reference(
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    )
