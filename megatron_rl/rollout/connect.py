"""The engines of a run as the controller uses them: monitor, exchange and client, put together and taken apart."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from megatron_rl.config import Config, read_hf_config

from .client import EngineClient, Limits
from .endpoint import engine_logs
from .exchange import HttpExchange
from .fitness import ExpectedModel
from .protocol import EngineError
from .replicas import Replicas
from .routed import RouteFormat
from .session import open_session
from .workers.pool import WorkerExchange

KEPT_FREE = 7
"""Tokens of its context that SGLang wants a prompt to leave."""


@asynccontextmanager
async def connect(
    urls: Sequence[str],
    *,
    vocab_size: int,
    expected: ExpectedModel | None = None,
    concurrency: int = 512,
    limits: Limits = Limits(),  # noqa: B008 - frozen
    api_key: str | None = None,
    weights_dir: Path | None = None,
    logs: Mapping[str, Path] | None = None,
    workers: int = 0,
    routes: RouteFormat | None = None,
    restarted: bool = False,
) -> AsyncIterator[EngineClient]:
    """A client for the replicas at `urls`, which are watched while the block runs; see `EngineClient`, `Replicas`.

    `workers` processes make the requests, or this one if 0; they keep `routes` of experts that are asked for.
    `restarted`: the run starts its engines again. Raises EngineError when the processes cannot be started; and in the
    middle of the block when the watching fails: nothing would come back any more, and nobody would know why.
    """
    settings = vocab_size, api_key, routes
    making = WorkerExchange(workers, *settings) if workers else HttpExchange(*settings)
    async with open_session(api_key) as session, making as exchange:
        replicas = Replicas(urls, session, expected, weights_dir, restarted=restarted)
        client = EngineClient(
            exchange, replicas, vocab_size=vocab_size, concurrency=concurrency, limits=limits, logs=logs
        )
        async with _watched(replicas), client:
            yield client


@asynccontextmanager
async def _watched(replicas: Replicas) -> AsyncIterator[None]:
    watch, owner = asyncio.create_task(replicas.run()), asyncio.current_task()
    assert owner is not None

    def interrupt(watch: asyncio.Task[None]) -> None:
        if not watch.cancelled():
            owner.cancel()

    watch.add_done_callback(interrupt)
    try:
        yield
    except asyncio.CancelledError:
        if not watch.done():
            raise
        owner.uncancel()
        raise EngineError("the monitor of the engines has failed; see the traceback") from watch.exception()
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)


@asynccontextmanager
async def connect_run(cfg: Config, urls: Sequence[str]) -> AsyncIterator[EngineClient]:
    """`connect` as a run's configuration wants it."""
    engine, rollout, hf = cfg.engine, cfg.rollout, read_hf_config(cfg.model.path)
    async with connect(
        urls,
        vocab_size=hf.vocab_size,
        expected=ExpectedModel(hf.vocab_size, hf.hidden_size, engine.routed_experts),
        concurrency=rollout.concurrency,
        limits=Limits(
            segment_tokens=rollout.segment_tokens,
            # Servers that the run starts have a longer context than the run needs; others may have the model's.
            context_length=hf.max_position_embeddings - KEPT_FREE if engine.urls else None,
            request_timeout_s=rollout.request_timeout_s,
            retries=rollout.retries,
            patience_s=0.0 if engine.urls else engine.ready_timeout_s,
        ),
        api_key=engine.read_api_key(cfg.run_dir),
        weights_dir=Path(cfg.run_dir) / "weights",
        logs=engine_logs(cfg.run_dir, urls),
        workers=client_workers(cfg),
        routes=RouteFormat.of(cfg, hf),
        restarted=not engine.urls,
    ) as client:
        yield client


def client_workers(cfg: Config) -> int:
    """Processes that talk to the engines: `rollout.client_workers`, or what its default stands for."""
    if cfg.rollout.client_workers is not None:
        return cfg.rollout.client_workers
    return 0 if cfg.engine.kind == "embedded" else cfg.cluster.controller_cpus
