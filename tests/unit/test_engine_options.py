"""Options of the embedded engine: ranges, and how a run's configuration becomes options."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.engines.embedded.options import EmbeddedOptions
from megatron_rl.engines.serve import bind, serve_embedded


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", 70000),
        ("dtype", "float8"),
        ("max_running_requests", 0),
        ("context_length", -1),
        ("kv_cache_gib", 0.0),
        ("num_threads", 0),
    ],
)
def test_a_value_out_of_range_names_its_key(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        EmbeddedOptions(model="somewhere", **{name: value})


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
