"""From a resolved configuration to this rank's `Session`: process group, model, clients, writers; and their end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from megatron_rl.cluster.bootstrap import find_place
from megatron_rl.cluster.meeting import MeetingError
from megatron_rl.cluster.rank_zero import RankZero, RankZeroError
from megatron_rl.cluster.run_dir import RunDir
from megatron_rl.cluster.staging import StageError
from megatron_rl.cluster.started import BootstrapError
from megatron_rl.colocation import Devices, EngineMemory, SharedDevices
from megatron_rl.config import Config, ConfigError, load_config
from megatron_rl.data import DataError
from megatron_rl.files import disk_failure
from megatron_rl.monitor.logs import setup_logging
from megatron_rl.monitor.metrics_log import MetricsFileError
from megatron_rl.monitor.recorder import Recorder
from megatron_rl.monitor.report_data import ReportError
from megatron_rl.policy import checkpoint, distributed
from megatron_rl.policy.checkpoint import CheckpointError
from megatron_rl.policy.distributed import DistributedError, peer_failure
from megatron_rl.policy.model import ModelError
from megatron_rl.policy.policy import Policy, PolicyError
from megatron_rl.rollout.control import EngineControl
from megatron_rl.rollout.dump import remove_dumps_from
from megatron_rl.rollout.endpoint import engine_logs, engine_urls
from megatron_rl.rollout.ledger import Ledger, LedgerError
from megatron_rl.rollout.protocol import EngineError
from megatron_rl.rollout.pull import ControllerClient, ControllerError
from megatron_rl.rollout.route_files import discard_lists_after
from megatron_rl.routes import RoutesError
from megatron_rl.session import Session
from megatron_rl.weights import WeightsError
from megatron_rl.weights.version_dir import discard_versions_after

EXPECTED_ERRORS = (
    BootstrapError,
    CheckpointError,
    ConfigError,
    ControllerError,
    DataError,
    DistributedError,
    EngineError,
    MetricsFileError,
    ModelError,
    LedgerError,
    MeetingError,
    PolicyError,
    RankZeroError,
    ReportError,
    RoutesError,
    StageError,
    WeightsError,
)
"""What may go wrong in a run without a fault in the code; the message is complete, a traceback would hide it."""


def in_words(error: Exception) -> str | None:
    """The whole message of an error that a run may end with; None for a fault in the code."""
    if isinstance(error, EXPECTED_ERRORS):
        return str(error)
    return disk_failure(error) or (peer_failure(error) if isinstance(error, RuntimeError) else None)


@contextmanager
def open_session(config: Path, resume_from: Path | None) -> Iterator[Session]:
    """Join the other ranks, build the policy, find controller and engines; leave everything in order afterwards.

    `resume_from` is the checkpoint to go on from; without one the run begins from its start, whatever lies there.
    """
    cfg = load_config(config)
    place = find_place(os.environ, RunDir(cfg.run_dir).endpoints)
    distributed.initialize(place, cfg.parallel, cfg.seed, cfg.cluster.collective_timeout_s, cfg.cluster.device)
    rank = dist.get_rank()
    setup_logging("trainer", rank, cfg.logging.level)  # stderr is the rank's log file already
    recorder = None
    if rank == 0:
        cut_back(Path(cfg.run_dir), resume_from)
        recorder = _recorder(cfg, resume_from)
    try:
        yield _session(cfg, rank, recorder, resume_from)
    finally:
        if recorder:
            recorder.close()
        distributed.shutdown()


def cut_back(run_dir: Path, resume_from: Path | None) -> None:
    """Remove what an earlier start wrote after the checkpoint, later checkpoints first; metrics: see `Recorder`."""
    step = checkpoint.step_of(resume_from) if resume_from else 0
    if resume_from:
        checkpoint.discard_after(run_dir, step)
    discard_lists_after(run_dir, step)
    Ledger(run_dir).truncate_after(step)
    remove_dumps_from(run_dir, step + 1 if resume_from else 0)
    discard_versions_after(RunDir(run_dir).weights, step)


def _session(cfg: Config, rank: int, recorder: Recorder | None, resume_from: Path | None) -> Session:
    zero = RankZero(dist.distributed_c10d._get_default_store(), rank)
    controller = ControllerClient(cfg.run_dir, cfg.cluster.start_timeout_s, cfg.cluster.controller_timeout_s)
    if cfg.cluster.placement == "colocated":
        engines = connect_engines(cfg, zero)
        policy, devices = _take_devices(cfg, zero, engines)
    else:
        policy, devices = Policy.build(cfg), Devices()  # engines load their model meanwhile
        engines = connect_engines(cfg, zero)
    return Session(cfg, policy, controller, engines, zero, recorder, resume_from, devices)


def connect_engines(cfg: Config, zero: RankZero) -> EngineControl:
    """Wait for the engines' addresses."""
    urls = zero.run("engines", lambda: engine_urls(cfg), cfg.engine.ready_timeout_s + 30)
    patience = 0.0 if cfg.engine.urls else cfg.engine.ready_timeout_s  # those have no supervisor of ours
    logs = engine_logs(cfg.run_dir, urls)
    key, deadline = cfg.engine.read_api_key(cfg.run_dir), cfg.engine.update_timeout_s
    return EngineControl(urls, timeout_s=deadline, patience_s=patience, api_key=key, logs=logs)


def _take_devices(cfg: Config, zero: RankZero, engines: EngineControl) -> tuple[Policy, Devices]:
    """The policy finds its memory free: engines, which have measured what there is for them, have given it up."""
    memory, timeout_s = EngineMemory(engines, RunDir(cfg.run_dir)), cfg.engine.update_timeout_s
    zero.run("engines give up their memory", memory.release_all, timeout_s + 30)
    policy = Policy.build(cfg)
    return policy, SharedDevices(policy.memory, memory, zero, timeout_s, cfg.cluster.stop_timeout_s)


def _recorder(cfg: Config, resume_from: Path | None) -> Recorder:
    before_warm_up = -1 if RunDir(cfg.run_dir).metrics.exists() else None
    return Recorder(
        Path(cfg.run_dir),
        cfg.name,
        console=cfg.logging.console,
        updates_per_batch=cfg.algorithm.updates_per_batch,
        loss=cfg.algorithm.loss,
        resume_step=checkpoint.step_of(resume_from) if resume_from else before_warm_up,
        tensorboard=cfg.logging.tensorboard,
        wandb_project=cfg.logging.wandb_project if cfg.logging.wandb else None,
        config=cfg.model_dump(mode="json"),
    )
