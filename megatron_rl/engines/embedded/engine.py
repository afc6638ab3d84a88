"""The embedded engine put together: model, scheduler thread, HTTP server, signals, published address, orderly end."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import torch
import uvicorn
from tokenizers import Tokenizer

from megatron_rl.files import write_atomic

from .decoder import Decoder
from .fixed_shapes import FixedShapeDecoder
from .forward import ForwardPass
from .groups import Groups
from .options import SPARE_TOKENS, EmbeddedOptions
from .protocol import Limits
from .scheduler import Scheduler
from .server import create_app
from .service import Service
from .updates import Updates
from .weight_service import WeightService
from .weights import Weights, WeightsError, load_model, overall_checksum

log = logging.getLogger(__name__)
GRACE_S = 5
"""How long answers may take to be written after SIGTERM."""


def run(options: EmbeddedOptions, listener: socket.socket) -> bool:
    """Serve on a bound socket until a signal; False when the engine failed.

    Raises:
        WeightsError: the model cannot be loaded.
        ValueError: the model and the options do not fit together.
    """
    if options.num_threads is not None:
        torch.set_num_threads(options.num_threads)
    engine = Engine(options)
    asyncio.run(engine.serve(listener))
    return engine.scheduler.failure is None


class Engine:
    """The parts of one server, built in the order in which they need each other."""

    def __init__(self, options: EmbeddedOptions) -> None:
        self._options = options
        model = load_model(options.model, options.dtype)
        forward = ForwardPass(model)
        weights = Weights(model)
        _require_checksum(weights, options)
        limits = _limits(model, options)
        kind = FixedShapeDecoder if options.deterministic else Decoder
        routes = options.enable_return_routed_experts
        decoder = kind(forward, options.max_running_requests, limits.context_length, _kv_budget(options), routes)
        self.service = Service(limits, _tokenizer(options.model), options.seed)
        self.scheduler = Scheduler(
            decoder,
            options.weight_version,
            options.max_running_requests,
            on_finish=self.service.finished,
            on_failure=self._on_failure,
        )
        self.weights = WeightService(
            self.service.gate, Groups(), lambda: self.service.abort(None, abort_all=True), options.model
        )
        self.weights.attach(self.scheduler, Updates(self.scheduler, weights))
        information = {
            "tokenizer_path": options.model,
            "is_generation": True,
            "model_type": model.config.model_type,
            "architectures": model.config.architectures,
        }
        config = uvicorn.Config(
            create_app(self.service, self.weights, options, information),
            log_level="warning",
            access_log=False,
            lifespan="off",  # nothing here needs it, and a second signal would leave it with a traceback
            timeout_graceful_shutdown=GRACE_S,
            timeout_keep_alive=75,
        )
        self._server = _Server(config, self._begin_shutdown)

    async def serve(self, listener: socket.socket) -> None:
        """Run to the end; the address is published once requests are answered."""
        self._loop = asyncio.get_running_loop()
        self.service.attach(self.scheduler, self._loop)
        self.scheduler.start()
        serving = asyncio.ensure_future(self._server.serve(sockets=[listener]))
        try:
            while not self._server.started and not serving.done():
                await asyncio.sleep(0.01)
            if self._server.started:
                self._publish(listener)
            await serving
        finally:
            self._unpublish()
            self.scheduler.stop()
            if not await asyncio.to_thread(self.scheduler.join, GRACE_S):
                log.warning("the step in progress did not end within %d s of the shutdown", GRACE_S)

    def _begin_shutdown(self) -> None:
        self._loop.call_soon_threadsafe(self.service.close)

    def _on_failure(self) -> None:
        self._server.should_exit = True

    def _publish(self, listener: socket.socket) -> None:
        url = _url(listener)
        log.info("engine ready at %s, model %s", url, self._options.model)
        if self._options.endpoint_file is not None:
            text = json.dumps({"url": url, "pid": os.getpid(), "model": self._options.model})
            write_atomic(Path(self._options.endpoint_file), text)

    def _unpublish(self) -> None:
        """Remove the published address, unless a successor has published its own."""
        if self._options.endpoint_file is None:
            return
        path = Path(self._options.endpoint_file)
        try:
            if json.loads(path.read_text())["pid"] == os.getpid():
                path.unlink()
        except (FileNotFoundError, ValueError, KeyError):
            pass


class _Server(uvicorn.Server):
    """Ends with status 0 on a signal: uvicorn would raise the signal again after its shutdown."""

    def __init__(self, config: uvicorn.Config, on_signal: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_signal = on_signal

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True
        self._on_signal()


def _url(listener: socket.socket) -> str:
    """How others reach it: an address that means all interfaces is replaced by the name of this machine."""
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _require_checksum(weights: Weights, options: EmbeddedOptions) -> None:
    """An engine that starts in mid-run must hold the bytes that the others hold."""
    wanted = options.weights_checksum
    if wanted is not None and (found := overall_checksum(weights.checksums())) != wanted:
        raise WeightsError(
            f"{options.model}: the checksum is {found[:16]}..., engines that loaded version {options.weight_version} "
            f"reported {wanted[:16]}...; was the directory changed?"
        )


def _limits(model: Any, options: EmbeddedOptions) -> Limits:
    longest = model.config.max_position_embeddings
    length = options.context_length or longest
    if length > longest + SPARE_TOKENS:
        raise ValueError(f"context_length={length} exceeds the model's max_position_embeddings={longest}")
    generation = getattr(model, "generation_config", None)
    found = [model.config.eos_token_id, getattr(generation, "eos_token_id", None)]
    eos = {i for ids in found if ids is not None for i in (ids if isinstance(ids, list) else [ids])}
    return Limits(model.config.vocab_size, length, frozenset(eos))


def _kv_budget(options: EmbeddedOptions) -> int:
    if options.kv_cache_gib is not None:
        return int(options.kv_cache_gib * 2**30)
    return int(psutil.virtual_memory().available) // 2


def _tokenizer(model: str) -> Tokenizer | None:
    path = Path(model) / "tokenizer.json"
    return Tokenizer.from_file(str(path)) if path.is_file() else None
