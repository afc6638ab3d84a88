"""Starting an engine, SGLang or the embedded one: options from the command line or a run's configuration.

What the embedded engine does is in `embedded`, how SGLang is started in `sglang`.

    python -m megatron_rl.engines.serve --model DIR --endpoint-file FILE

This command starts the embedded one. torch and transformers are imported after the options have been checked: a mistake
is answered in a second, not in ten.
"""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import typer

from megatron_rl.addresses import family_of
from megatron_rl.config import Config
from megatron_rl.weights.current import CurrentWeights, to_start_with

from .embedded.options import SPARE_ROWS, SPARE_TOKENS, Dtype, EmbeddedOptions
from .sglang import serve_sglang, sglang_from_config
from .sglang_command import SglangOptions
from .sglang_install import find_python


def serve_replica(
    cfg: Config,
    replica: int,
    host: str,
    port: int,
    environ: Mapping[str, str],
    place: int = 0,
    node_rank: int = 0,
    staged: Path | None = None,
) -> None:
    """Serve replica number `replica` of a run, as `engine.kind` says; see `serve_embedded` and `serve_sglang`.

    `place`: its number among the replicas of this node; `node_rank`: which of its own nodes this is; `staged`: folder
    with copies of version directories, see `weights.current`.
    """
    if cfg.engine.kind == "sglang":
        serve_sglang(sglang_from_config(cfg, replica, host, port, place, node_rank, staged), environ)
    else:
        serve_embedded(options_from_config(cfg, replica, port, host, staged))


def serve_model(
    kind: Literal["embedded", "sglang"],
    model: Path,
    host: str,
    port: int,
    dtype: Dtype,
    api_key: str | None,
    python: str | None,
    environ: Mapping[str, str],
) -> None:
    """Serve a model for no run in particular; see `serve_embedded` and `serve_sglang`."""
    if kind == "embedded":
        serve_embedded(EmbeddedOptions(model=str(model), host=host, port=port, dtype=dtype, api_key=api_key))
        return
    folder = str(model.absolute())
    options = SglangOptions(folder, find_python(python), host, port, dtype=dtype, api_key=api_key)
    serve_sglang(options, environ)


def serve_embedded(options: EmbeddedOptions) -> None:
    """Serve until SIGTERM or SIGINT, then return. Exits with status 1 when the engine failed.

    Raises:
        ValueError: the model cannot be loaded, or does not fit the options.
        OSError: host and port cannot be bound.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s engine %(levelname)s %(message)s")
    if not (Path(options.model) / "config.json").is_file():
        raise ValueError(f"model {options.model}: no config.json there; give a Hugging Face model directory")
    with bind(options.host, options.port, options.reserved_port) as listener:
        from .embedded.engine import run

        healthy = run(options, listener)
    if not healthy:
        sys.exit(1)


def options_from_config(
    cfg: Config, replica: int, port: int, host: str = "127.0.0.1", staged: Path | None = None
) -> EmbeddedOptions:
    """The options of replica number `replica` of a run: with the weights that the run has published, if it has any.

    `port` is reserved by the engine's supervisor.
    """
    run_dir = Path(cfg.run_dir).absolute()
    weights = to_start_with(run_dir, replica, staged) or CurrentWeights(0, cfg.model.path)
    return EmbeddedOptions(
        model=weights.path,
        host=host,
        port=port,
        reserved_port=True,
        weight_version=str(weights.version),
        weights_checksum=weights.checksum,
        endpoint_file=str(run_dir / "endpoints" / f"engine-{replica}.json"),
        dtype=cfg.engine.compute_dtype(cfg.model.dtype),
        api_key=cfg.engine.read_api_key(run_dir),
        max_running_requests=cfg.engine.max_running_requests + (SPARE_ROWS if cfg.rollout.mode == "async" else 0),
        deterministic=cfg.deterministic,
        context_length=cfg.rollout.longest_sequence + SPARE_TOKENS,
        seed=cfg.seed + replica,
        enable_return_routed_experts=cfg.engine.routed_experts,
    )


def bind(host: str, port: int, reserved: bool = False) -> socket.socket:
    """A bound socket; a busy port is an error before minutes of loading, and a free one is kept from others.

    `reserved`: another process of this user holds the port for this one, with SO_REUSEPORT and without listening.
    """
    # With the protocol named, asyncio sets TCP_NODELAY on what it accepts; else small answers wait 40 ms for an ACK.
    listener = socket.socket(family_of(host), socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT if reserved else socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror}; choose another port, or 0 for any") from error
    return listener


def _main(
    model: Annotated[str, typer.Option(help="Hugging Face directory.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 = any free one.")] = 0,
    endpoint_file: Annotated[str | None, typer.Option(help="Where to publish the address.")] = None,
    dtype: Annotated[Dtype, typer.Option(help="Number format.")] = "auto",
    max_running_requests: Annotated[int, typer.Option(help="Sequences decoded at once.")] = 256,
    deterministic: Annotated[bool, typer.Option(help="Same bits whatever runs beside a request.")] = False,
    api_key: Annotated[str | None, typer.Option(help="Bearer token that requests must bring.")] = None,
    weight_version: Annotated[str, typer.Option(help="Name of the weights at start.")] = "default",
    context_length: Annotated[int | None, typer.Option(help="Prompt and response; default: the model's.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of requests without a sampling_seed.")] = None,
    num_threads: Annotated[int | None, typer.Option(help="Threads of one kernel.")] = None,
    enable_return_routed_experts: Annotated[bool, typer.Option(help="Keep the experts of every token.")] = False,
) -> None:
    """Serve a model with the embedded engine."""
    try:
        serve_embedded(
            EmbeddedOptions(
                model, host, port, False, endpoint_file, dtype, max_running_requests, deterministic, api_key,
                weight_version, None, context_length, seed, num_threads, enable_return_routed_experts,
            )
        )  # fmt: skip
    except (ValueError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error


if __name__ == "__main__":
    typer.run(_main)
