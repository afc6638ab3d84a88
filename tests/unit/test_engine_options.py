"""Options of the embedded engine: ranges, and how a run's configuration becomes options."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.engines.embedded.engine import Engine
from megatron_rl.engines.embedded.options import SPARE_ROWS, EmbeddedOptions
from megatron_rl.engines.embedded.weights import Weights, WeightsError, load_model, overall_checksum
from megatron_rl.engines.serve import bind, options_from_config, serve_embedded
from megatron_rl.engines.sglang import sglang_from_config
from megatron_rl.weights.current import CurrentWeights, announce
from tests.tiny import tiny_model
from tests.unit.rollout_rig import config


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", 70000),
        ("max_running_requests", 0),
        ("context_length", -1),
        ("num_threads", 0),
    ],
)
def test_a_value_out_of_range_names_its_key(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        EmbeddedOptions(model="somewhere", **{name: value})


def test_a_run_with_published_weights_starts_its_engine_with_them_and_their_checksum(tmp_path: Path) -> None:
    cfg = config(tmp_path, tmp_path / "base", [])
    first = options_from_config(cfg, replica=1, port=7)
    assert (first.model, first.weight_version, first.weights_checksum) == (str(tmp_path / "base"), "0", None)
    announce(tmp_path / "weights", CurrentWeights(12, str(tmp_path / "weights" / "v000012"), "abc"))
    later = options_from_config(cfg, replica=1, port=7)
    assert (later.model, later.weight_version) == (str(tmp_path / "weights" / "v000012"), "12")
    assert (later.weights_checksum, later.port, later.reserved_port) == ("abc", 7, True)


def test_engines_have_rows_for_the_probe_where_requests_go_on_during_an_update(tmp_path: Path) -> None:
    cfg = config(tmp_path, tmp_path / "base", [])
    rows = cfg.engine.max_running_requests
    beside = cfg.model_copy(update={"rollout": cfg.rollout.model_copy(update={"mode": "async"})})
    for options in (lambda c: options_from_config(c, 0, 7), lambda c: sglang_from_config(c, 0, "127.0.0.1", 7)):
        assert options(cfg).max_running_requests == rows
        assert options(beside).max_running_requests == rows + SPARE_ROWS


def test_weights_with_another_checksum_than_announced_are_not_served(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model", seed=0)
    right = overall_checksum(Weights(load_model(str(model), "auto")).checksums())
    Engine(EmbeddedOptions(str(model), weights_checksum=right, max_running_requests=2))
    with pytest.raises(WeightsError, match="version 7 reported 0000000000000000"):
        Engine(EmbeddedOptions(str(model), weights_checksum="0" * 64, weight_version="7", max_running_requests=2))


def test_a_busy_port_is_reported_before_the_model_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}.*choose another port"):
            serve_embedded(EmbeddedOptions(model=str(tmp_path), port=port))


def test_small_answers_are_sent_at_once() -> None:
    """Without TCP_NODELAY each answer on a kept connection waits 40 ms for the peer's delayed acknowledgement."""
    accepted: list[int] = []

    async def serve_one() -> None:
        done = asyncio.Event()

        async def on_connection(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            accepted.append(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()
            done.set()

        listener = bind("127.0.0.1", 0)
        async with await asyncio.start_server(on_connection, sock=listener):
            _, writer = await asyncio.open_connection(*listener.getsockname())
            await asyncio.wait_for(done.wait(), 10)
            writer.close()

    asyncio.run(serve_one())
    assert accepted == [1]
