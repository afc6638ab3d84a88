"""The embedded engine put together: model, scheduler thread, HTTP server, signals, published address, orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from types import FrameType
from typing import Any

import psutil
import torch
import uvicorn

from megatron_rl.addresses import published, url_of

from .decoder import Decoder
from .fixed_shapes import FixedShapeDecoder
from .forward import ForwardPass
from .groups import Groups
from .options import SPARE_TOKENS, EmbeddedOptions
from .protocol import Limits
from .scheduler import Scheduler
from .server import create_app
from .service import Service
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
        # For keys and values of running sequences; an eighth more is for ended ones that may be continued.
        budget = psutil.virtual_memory().available // 2
        decoder = kind(forward, options.max_running_requests, limits.context_length, budget, routes)
        self.service = Service(limits, options.seed)
        self.scheduler = Scheduler(
            decoder,
            options.weight_version,
            options.max_running_requests,
            on_finish=self.service.finished,
            on_failure=self._on_failure,
        )
        self.weights = WeightService(self.service.gate, Groups(), self.scheduler, weights, options.model)
        config = uvicorn.Config(
            create_app(self.service, self.weights, options),
            log_level="warning",
            access_log=False,
            lifespan="off",  # nothing here needs it, and a second signal would leave it with a traceback
            timeout_graceful_shutdown=GRACE_S,
            timeout_keep_alive=75,
        )
        self._server = _Server(config, lambda: self._loop.call_soon_threadsafe(self.service.close))

    async def serve(self, listener: socket.socket) -> None:
        """Run to the end; the address is published once requests are answered."""
        self._loop = asyncio.get_running_loop()
        self.service.attach(self.scheduler, self._loop)
        self.scheduler.start()
        serving = asyncio.ensure_future(self._server.serve(sockets=[listener]))
        try:
            while not self._server.started and not serving.done():
                await asyncio.sleep(0.01)
            with contextlib.ExitStack() as stack:
                if self._server.started:
                    url = url_of(*listener.getsockname()[:2])
                    stack.enter_context(published(self._options.endpoint_file, url, self._options.model))
                await serving
        finally:
            self.scheduler.stop()
            if not await asyncio.to_thread(self.scheduler.join, GRACE_S):
                log.warning("the step in progress did not end within %d s of the shutdown", GRACE_S)

    def _on_failure(self) -> None:
        self._server.should_exit = True


class _Server(uvicorn.Server):
    """Ends with status 0 on a signal: uvicorn would raise the signal again after its shutdown."""

    def __init__(self, config: uvicorn.Config, on_signal: Callable[[], object]) -> None:
        super().__init__(config)
        self._on_signal = on_signal

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True
        self._on_signal()


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
