"""Starting the embedded engine and ending it: options, sockets, signals, the published address. No route, no model code.

    python -m megatron_rl.engines.serve --model DIR --endpoint-file FILE
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import psutil
import torch
import typer
import uvicorn
from tokenizers import Tokenizer

from megatron_rl.config import Config

from .embedded.decoder import Decoder
from .embedded.fixed_shapes import FixedShapeDecoder
from .embedded.forward import ForwardPass
from .embedded.options import Dtype, EmbeddedOptions
from .embedded.protocol import Limits
from .embedded.scheduler import Scheduler
from .embedded.server import create_app
from .embedded.service import Service
from .embedded.weights import Weights, WeightsError, load_model

log = logging.getLogger(__name__)
GRACE_S = 5
"""How long answers may take to be written after SIGTERM."""


def serve_embedded(options: EmbeddedOptions) -> None:
    """Serve until SIGTERM or SIGINT, then return. Exits with status 1 when the engine failed.

    Raises:
        WeightsError: the model cannot be loaded.
        ValueError: the model or the options do not fit together.
        OSError: host and port cannot be bound.
    """
    listener = _bind(options.host, options.port)
    if options.num_threads is not None:
        torch.set_num_threads(options.num_threads)
    engine = _Engine(options)
    asyncio.run(engine.serve(listener))
    if engine.scheduler.failure is not None:
        sys.exit(1)


def options_from_config(cfg: Config, replica: int) -> EmbeddedOptions:
    """The options of replica number `replica` of a run."""
    dtype = cfg.model.dtype if cfg.engine.dtype == "model" else cfg.engine.dtype
    return EmbeddedOptions(
        model=cfg.model.path,
        endpoint_file=str(Path(cfg.run_dir).absolute() / "endpoints" / f"engine-{replica}.json"),
        dtype=dtype,
        max_running_requests=cfg.engine.max_running_requests,
        deterministic=cfg.deterministic,
        context_length=cfg.rollout.max_prompt_tokens + cfg.rollout.max_response_tokens,
        seed=cfg.seed + replica,
    )


def standalone_options(model: Path, host: str, port: int) -> EmbeddedOptions:
    """The options of a server that belongs to no run."""
    return EmbeddedOptions(model=str(model), host=host, port=port)


class _Engine:
    """The parts of one server, built in the order in which they need each other."""

    def __init__(self, options: EmbeddedOptions) -> None:
        self._options = options
        model = load_model(options.model, options.dtype)
        forward = ForwardPass(model)
        limits = _limits(model, options)
        kind = FixedShapeDecoder if options.deterministic else Decoder
        decoder = kind(forward, options.max_running_requests, limits.context_length, _kv_budget(options))
        self.service = Service(limits, options.model, _tokenizer(options.model), options.seed)
        self.scheduler = Scheduler(
            decoder,
            Weights(model),
            options.weight_version,
            options.max_running_requests,
            on_finish=self.service.finished,
            on_failure=self._on_failure,
        )
        information = {
            "tokenizer_path": options.model,
            "is_generation": True,
            "model_type": model.config.model_type,
            "architectures": model.config.architectures,
        }
        config = uvicorn.Config(
            create_app(self.service, options, information),
            log_level="warning",
            access_log=False,
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
            self._retract()
            self.scheduler.stop()
            await asyncio.to_thread(self.scheduler.join, GRACE_S)

    def _begin_shutdown(self) -> None:
        self._loop.call_soon_threadsafe(self.service.close)

    def _on_failure(self) -> None:
        self._server.should_exit = True

    def _publish(self, listener: socket.socket) -> None:
        host, port = listener.getsockname()[:2]
        url = f"http://{host}:{port}"
        log.warning("engine ready at %s, model %s", url, self._options.model)
        if self._options.endpoint_file is not None:
            text = json.dumps({"url": url, "pid": os.getpid(), "model": self._options.model})
            _write_atomically(Path(self._options.endpoint_file), text)

    def _retract(self) -> None:
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

    def __init__(self, config: uvicorn.Config, on_signal: Any) -> None:
        super().__init__(config)
        self._on_signal = on_signal

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True
        self._on_signal()


def _bind(host: str, port: int) -> socket.socket:
    """A bound socket; a busy port is an error before minutes of loading, and a free one is kept from others."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror}; choose another port, or 0 for any") from error
    return listener


def _limits(model: Any, options: EmbeddedOptions) -> Limits:
    longest = model.config.max_position_embeddings
    length = options.context_length or longest
    if length > longest:
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


def _write_atomically(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "w") as handle:
        handle.write(text)
        handle.flush()
        os.fsync(handle.fileno())
    os.replace(temporary, path)


def _main(
    model: Annotated[str, typer.Option(help="Hugging Face directory.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 = any free one.")] = 0,
    endpoint_file: Annotated[str | None, typer.Option(help="Where to publish the address.")] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16")] = "auto",
    max_running_requests: Annotated[int, typer.Option(help="Sequences decoded at once.")] = 256,
    deterministic: Annotated[bool, typer.Option(help="Same bits whatever runs beside a request.")] = False,
    api_key: Annotated[str | None, typer.Option(help="Bearer token that requests must bring.")] = None,
    weight_version: Annotated[str, typer.Option(help="Name of the weights at start.")] = "default",
    context_length: Annotated[int | None, typer.Option(help="Prompt and response; default: the model's.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of requests without a sampling_seed.")] = None,
    num_threads: Annotated[int | None, typer.Option(help="Threads of one kernel.")] = None,
    kv_cache_gib: Annotated[float | None, typer.Option(help="Memory for keys and values.")] = None,
) -> None:
    """Serve a model with the embedded engine."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s engine %(levelname)s %(message)s")
    chosen: Dtype = dtype  # type: ignore[assignment] - EmbeddedOptions checks it
    try:
        serve_embedded(
            EmbeddedOptions(
                model, host, port, endpoint_file, chosen, max_running_requests, deterministic, api_key,
                weight_version, context_length, seed, num_threads, kv_cache_gib,
            )
        )  # fmt: skip
    except (WeightsError, ValueError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error


if __name__ == "__main__":
    typer.run(_main)
