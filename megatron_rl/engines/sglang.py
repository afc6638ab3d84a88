"""Starting a real SGLang server and staying with it until its end. Its command line is made in `sglang_command`.

    launcher (this process) -> python -m sglang.launch_server, in its own virtual environment -> schedulers, detokenizer
             '- guard: ends them all if the launcher is killed

Waits for: /ready, with a deadline; then for TERM or INT, or the server's end, without one.
"""

from __future__ import annotations

import json
import logging
import signal
import socket
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import yaml

from megatron_rl.addresses import family_of, free_port, local_url, published, url_of
from megatron_rl.config import Config
from megatron_rl.files import write_atomic
from megatron_rl.weights.current import CurrentWeights, to_start_with

from .embedded.options import SPARE_ROWS, SPARE_TOKENS
from .server_process import ServerFailed, ServerProcess, call
from .sglang_command import SglangOptions, command_line, environment
from .sglang_install import SglangError, find_python, require_tested

log = logging.getLogger(__name__)
GRACE_S = 5.0
POLL_S = 0.2
CHECKSUM_TIMEOUT_S = 300.0
WARM_UP_TOKENS = 128
"""The least context in which SGLang's first request to itself fits, even with a token for every byte."""


def sglang_from_config(
    cfg: Config,
    replica: int,
    host: str,
    port: int,
    place: int = 0,
    node_rank: int = 0,
    staged: Path | None = None,
) -> SglangOptions:
    """The options of replica number `replica` of a run: with the weights that the run has published, if it has any."""
    e, run_dir = cfg.engine, Path(cfg.run_dir).absolute()
    weights = to_start_with(run_dir, replica, staged) or CurrentWeights(0, cfg.model.path)
    longest = e.context_length or cfg.rollout.longest_sequence
    return SglangOptions(
        model=str(Path(weights.path).absolute()),
        python=find_python(e.python),
        host=host,
        port=port,
        endpoint_file=str(run_dir / "endpoints" / f"engine-{replica}.json"),
        api_key=e.read_api_key(run_dir),
        weight_version=str(weights.version),
        weights_checksum=weights.checksum,
        dtype=e.compute_dtype(cfg.model.dtype),
        max_running_requests=e.max_running_requests + (SPARE_ROWS if cfg.rollout.mode == "async" else 0),
        context_length=max(longest + SPARE_TOKENS, WARM_UP_TOKENS),
        tp=e.tp,
        dp=e.dp,
        ep=e.ep,
        memory_fraction=e.memory_fraction,
        deterministic=cfg.deterministic,
        routed_experts=e.routed_experts,
        seed=cfg.seed + replica,
        first_device=place * e.tp * e.dp,
        shares_devices=cfg.cluster.placement == "colocated",
        nodes=e.nodes_per_replica,
        node_rank=node_rank,
        head_file=str(run_dir / "endpoints" / f"head-{replica}.json"),
        extra_args=tuple(e.extra_args),
        untested_version=e.untested_version,
        ready_timeout_s=e.ready_timeout_s,
    )


def serve_sglang(options: SglangOptions, environ: Mapping[str, str]) -> None:
    """Serve until TERM or INT, then return; no process of the server is left.

    Args:
        environ: what the server inherits: without the variables of Slurm and MPI, else it takes itself for a rank.

    Raises:
        SglangError: it cannot be started: no or another SGLang, no weights, a port that is taken.
        ServerFailed: it ended, or did not answer in time; with the end of its output.
    """
    stopping: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: stopping.append(received))
    _require_weights(options.model)
    installed = require_tested(options.python, options.untested_version)
    port = options.port or free_port(options.host)
    _require_free(options.host, port)
    with tempfile.TemporaryDirectory(prefix="megatron-rl-sglang-") as folder:
        secrets = _write_keys(Path(folder), options.api_key)
        argv = command_line(options, port, installed, secrets, head_address(options))
        log.info("starting SGLang %s: %s", installed.sglang, " ".join(argv))
        with ServerProcess("SGLang", argv, environment(options, installed, environ), GRACE_S) as server:
            url = local_url(options.host, port)
            if not server.wait_ready(url, options.ready_timeout_s, lambda: bool(stopping), "engine.ready_timeout_s"):
                return
            _require_checksum(options, url)
            file = options.endpoint_file if options.node_rank == 0 else None
            with published(file, url_of(options.host, port), options.model):
                server.wait(lambda: bool(stopping))


def _write_keys(folder: Path, api_key: str | None) -> Path | None:
    """Words for SGLang in a file that only we can read: a command line can be read by everybody on the machine."""
    if api_key is None:
        return None
    path = folder / "keys.yaml"
    path.touch(mode=0o600)
    path.write_text(yaml.safe_dump({"api-key": api_key, "admin-api-key": api_key}))
    return path


def _require_weights(model: str) -> None:
    folder = Path(model)
    if not (folder / "config.json").is_file():
        raise SglangError(f"model {model}: no config.json there; give a Hugging Face model directory")
    if not any(folder.glob("*.safetensors")):
        raise SglangError(f"model {model}: no *.safetensors files there; were the weights downloaded?")


def _require_free(host: str, port: int) -> None:
    with socket.socket(family_of(host)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as SGLang itself; our supervisor holds it so too
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            raise SglangError(
                f"cannot listen on {host}:{port}: {error.strerror}; choose another port, or 0 for any"
            ) from error


def head_address(options: SglangOptions) -> str | None:
    """HOST:PORT at which the nodes of one replica meet; None for a single node.

    The first node writes it to `head_file`, in the run's directory, the others wait for it.

    Raises:
        ServerFailed: the first node has not written it within `ready_timeout_s`.
    """
    if options.nodes == 1:
        return None
    path = Path(options.head_file)
    if options.node_rank == 0:
        address = f"{socket.gethostname()}:{free_port('')}"
        write_atomic(path, json.dumps({"address": address}))
        return address
    deadline = time.monotonic() + options.ready_timeout_s
    while not path.exists():
        if time.monotonic() > deadline:
            raise ServerFailed(
                f"node {options.node_rank} of {options.nodes} waited {options.ready_timeout_s:g} s "
                f"(engine.ready_timeout_s) for {path} from the replica's first node; look at that node's log"
            )
        time.sleep(POLL_S)
    return str(json.loads(path.read_text())["address"])


def _require_checksum(options: SglangOptions, url: str) -> None:
    """A server that starts in mid-run must hold the bytes that the others hold."""
    if options.weights_checksum is None:
        return
    try:
        answer = call(f"{url}/weights_checker", {"action": "checksum"}, options.api_key, CHECKSUM_TIMEOUT_S)
    except OSError as error:
        raise ServerFailed(f"SGLang did not report the checksum of its weights: {error}") from error
    found = answer.get("per_engine_checksum")
    if found != options.weights_checksum:
        raise ServerFailed(
            f"{options.model}: the checksum is {found}, engines that loaded version {options.weight_version} reported "
            f"{options.weights_checksum}; was the directory changed?"
        )
