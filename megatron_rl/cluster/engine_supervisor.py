"""Keeps the engines of one machine alive: starts one again that died or hangs, gives up when that comes too often.

Waits for: an engine's end, without a deadline, since it serves as long as the run lasts, unless it falls silent (see
`liveness.py`), which ends it; TERM or INT ends all.

Nobody need be told of a restart: the port stays the same, since it is reserved here, and RUN/endpoints/address-<i>.json
says from the beginning where that is. A run of several engines goes on as long as one of them serves (`fellows.py`),
but for those that share devices with the trainer or span nodes.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from megatron_rl.addresses import family_of, free_port, local_url, url_of
from megatron_rl.config import Config
from megatron_rl.files import write_atomic

from .bootstrap import child_environment, task_of_step
from .engine_process import Engine, Patience, RestartLimit
from .fellows import Fellows
from .run_dir import RunDir
from .staged import Report
from .staging import Stage, carry_out_requests
from .turn import engines_may_start

POLL_S = 0.1


def supervise_engine(cfg: Config, config: Path, replica: int) -> int:
    """Run replica number `replica` of the run that `config` describes, until TERM. Returns the exit code."""
    return _supervise_replicas(cfg, config, [replica], "127.0.0.1")


def supervise_node(cfg: Config, config: Path, per_node: int, host: str, logs: Path) -> int:
    """Run this node's replicas, as one task of a Slurm step: `per_node` of them, by the task's number, until TERM.

    Each logs to LOGS/engine-NODE-REPLICA.log and listens on `host`. What Slurm and MPI say about the step stays hidden
    from them: a server that starts ranks of its own would take itself for a rank of ours. Returns the exit code.
    """
    task, span = task_of_step(os.environ)[1], cfg.engine.nodes_per_replica
    first = task * per_node // span
    replicas = range(first, min(first + per_node, cfg.engine.replicas))
    return _supervise_replicas(cfg, config, replicas, host, child_environment(os.environ), logs, task % span)


def _supervise_replicas(
    cfg: Config,
    config: Path,
    replicas: Sequence[int],
    host: str,
    env: Mapping[str, str] | None = None,
    logs: Path | None = None,
    node_rank: int = 0,
) -> int:
    """`node_rank`: which of its nodes this is, for a replica that spans several; its parts only restart together."""
    cluster, run = cfg.cluster, RunDir(cfg.run_dir)
    restarts = cluster.max_engine_restarts if cfg.engine.nodes_per_replica == 1 else 0
    node = socket.gethostname().split(".")[0]
    with contextlib.ExitStack() as stack:
        staged: list[str] = []
        copies = stack.enter_context(contextlib.ExitStack())
        if cfg.engine.stage_in_memory:
            stage, name = copies.enter_context(Stage(run)), node if logs else f"{node}-{replicas[0]}"
            copies.enter_context(carry_out_requests(stage, run, Report(node, [*replicas]), name))
            staged = ["--staged", str(stage.folder)]
        engines = []
        for place, replica in enumerate(replicas):
            port = stack.enter_context(reserved_port(host, cfg.engine.kind == "sglang")).getsockname()[1]
            if node_rank == 0:
                write_atomic(run.engine_address(replica), json.dumps({"url": url_of(host, port)}))
            argv = [sys.executable, "-m", "megatron_rl.cli", "serve", "--config", str(config), "--unsupervised"]
            argv += ["--replica", str(replica), "--place", str(place), "--node-rank", str(node_rank), *staged]
            engine = Engine(
                "the engine" if logs is None else f"engine-{replica}",
                [*argv, "--host", host, "--port", str(port)],
                run.engine_endpoint(replica),
                RestartLimit(restarts, cluster.engine_restart_window_s),
                _patience(cfg, host, port) if node_rank == 0 else None,
                env,
                None if logs is None else logs / f"engine-{node}-{replica}.log",
                functools.partial(engines_may_start, run.endpoints),
                Fellows(run, replica, cfg.engine.replicas) if cfg.one_engine_is_enough else None,
            )
            engines.append(engine)
        return supervise(engines, cluster.stop_timeout_s, copies.close)


def _patience(cfg: Config, host: str, port: int) -> Patience:
    engine = cfg.engine
    start_s = engine.ready_timeout_s + engine.silent_timeout_s
    return Patience(local_url(host, port), engine.read_api_key(cfg.run_dir), start_s, engine.silent_timeout_s)


def reserved_port(host: str, for_sglang: bool = False) -> socket.socket:
    """A socket bound to a free port that never listens: others cannot get the port, the engine can bind beside it."""
    # Only processes of this user that set SO_REUSEPORT too may bind. SGLang sets SO_REUSEADDR alone, with which the
    # system would give the port to whoever asks for any free one: it must be one that the system gives to nobody.
    option, port = (socket.SO_REUSEADDR, free_port(host)) if for_sglang else (socket.SO_REUSEPORT, 0)
    reservation = socket.socket(family_of(host))
    reservation.setsockopt(socket.SOL_SOCKET, option, 1)
    reservation.bind((host, port))
    return reservation


def supervise(engines: Sequence[Engine], patience_s: float, tidy: Callable[[], None] = lambda: None) -> int:
    """Start all again and again until TERM or INT (0), or until one may not be started again (1), which ends all.

    One that the run can do without is left alone instead, until no engine of the run serves any more (1).

    Args:
        patience_s: from TERM to KILL, for an engine that hangs.
        tidy: called when engines were told to end, before they are waited for: we may be killed meanwhile.
    """
    stopping: list[int] = []

    def end(number: int, _: object) -> None:
        stopping.append(number)
        for engine in engines:
            engine.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    for engine in engines:
        engine.start()
    going = list(engines)
    while not stopping and _go_on(engines, going):
        time.sleep(POLL_S)
    for engine in engines:  # also one that was being started when the signal came
        engine.stop()
    deadline = time.monotonic() + patience_s
    tidy()
    for engine in engines:
        engine.end(deadline)
    return 0 if stopping else 1


def _go_on(engines: Sequence[Engine], going: list[Engine]) -> bool:
    """Look after those that are `going`, and leave out who is at an end; whether there is still one to wait for."""
    for engine in tuple(going):
        if not engine.may_go_on():
            if not engine.replaceable:
                return False
            going.remove(engine)
    return bool(going) or any(engine.replaceable for engine in engines)
