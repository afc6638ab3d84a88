"""Brings up torch.distributed and Megatron's parallel state for one rank, and takes them down; builds no model.

Which rank it is and where the others are was found out before (`cluster.bootstrap`) and is handed in.
"""

from __future__ import annotations

import math
import os
import random
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from megatron_rl import cpu_backend

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store, TCPStore

    from megatron_rl.config.parallel import ParallelConfig
else:
    from torch.distributed import TCPStore


class DistributedError(RuntimeError):
    """The processes that were started do not fit the configuration; the message says what to change."""


class Meeting(Protocol):
    """How the ranks find the store that they share."""

    def meet(
        self,
        serve: Callable[[], tuple[TCPStore, int]],
        connect: Callable[[str, int, float], TCPStore],
        timeout_s: float,
    ) -> TCPStore:
        """The store, served by rank 0."""
        ...


class Place(Protocol):
    """Which rank this is."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def local_rank(self) -> int: ...

    @property
    def meeting(self) -> Meeting | None:
        """None where torch.distributed finds the store by itself."""
        ...


def initialize(
    place: Place,
    parallel_cfg: ParallelConfig,
    seed: int,
    timeout_s: float,
    device: Literal["auto", "cpu", "cuda"] = "auto",
) -> None:
    """Join the process group, build Megatron's parallel groups and seed every generator.

    Args:
        place: this rank, and how it meets the others.
        parallel_cfg: the section `parallel`.
        seed: the run's seed; tensor-parallel ranks get their own stream inside Megatron's RNG tracker.
        timeout_s: seconds after which a collective (and the rendezvous) gives up. Megatron takes whole minutes for its
            own groups: rounded up.
        device: `cluster.device`.

    Raises:
        DistributedError: CUDA is asked for and absent, or the number of processes is not `parallel.world_size`,
            or this rank sees no GPU of its own.
    """
    _check_world_size(place.world_size, parallel_cfg)
    if device == "cuda" and (problem := cuda_problem(1)):
        raise DistributedError(problem)
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before anything of this process has looked for devices
    on_cpu = cpu_backend.install()
    from megatron.core import parallel_state, tensor_parallel

    if on_cpu:
        torch.set_num_threads(1)
    elif problem := device_problem(place.local_rank, torch.cuda.device_count()):
        raise DistributedError(problem)
    else:
        torch.cuda.set_device(place.local_rank)
    if not dist.is_initialized():
        _join(place, "gloo" if on_cpu else "nccl", timeout_s)
    parallel_state.initialize_model_parallel(
        **parallel_cfg.group_sizes,
        distributed_timeout_minutes=max(1, math.ceil(timeout_s / 60)),
    )
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def cuda_problem(count: int) -> str | None:
    """Why `cluster.device=cuda` cannot be had for `count` ranks on this machine; None when it can."""
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found >= count:
        return None
    if torch.version.cuda is None:
        reason = f"torch {torch.__version__} is a build without CUDA; install one with it"
    elif found:
        reason = f"this machine shows {found} of the {count} devices that section `parallel` needs here"
    else:
        reason = "no device is found; look at nvidia-smi and CUDA_VISIBLE_DEVICES"
    return f"cluster.device=cuda: {reason}, or set cluster.device=cpu (auto takes what there is)"


def device_problem(local_rank: int, visible: int) -> str | None:
    """Why rank number `local_rank` of a node that sees `visible` GPUs has none for itself; None when it has one."""
    if local_rank < visible:
        return None
    return (
        f"this rank is number {local_rank} of its node, counted from 0, but sees {visible} GPU(s): every rank must "
        "see all GPUs of its node and takes the one of its number. With srun, ask for --gpus-per-node instead of "
        "--gpus-per-task, and start no more ranks on a node than it has GPUs (cluster.ranks_per_node)"
    )


def peer_failure(error: BaseException) -> str | None:
    """In words, if `error` is a collective that another rank did not take part in; else None.

    gloo raises a bare RuntimeError, so its text decides; NCCL has a class.
    """
    text = str(error)
    if not isinstance(error, dist.DistBackendError) and "/gloo/" not in text:
        return None
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "megatron_rl" in f.filename]
    where = f"{frames[-1].name} ({frames[-1].filename}:{frames[-1].lineno})" if frames else "a collective"
    reason = " ".join(text.split()).rpartition("] ")[2][:200]
    return (
        f"this rank was left alone in {where}: {reason}. Another trainer rank has ended or hangs: "
        "look at the logs of the others, or raise cluster.collective_timeout_s if it was only slow"
    )


def _join(place: Place, backend: str, timeout_s: float) -> None:
    timeout = timedelta(seconds=timeout_s)
    if place.meeting is None:
        dist.init_process_group(backend, timeout=timeout)
        return
    store = place.meeting.meet(_serve, _connect, timeout_s)
    store.set_timeout(timeout)
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.world_size, timeout=timeout)


def shared_store(place: Place, timeout_s: float) -> Store:
    """A key-value store of all ranks, for those that send each other no tensors and need no process group. Collective.

    Args:
        timeout_s: seconds after which meeting, and later a wait for a key, gives up.
    """
    store: Store
    if place.meeting is None:
        store, _, _ = next(iter(rendezvous("env://")))
    else:
        store = place.meeting.meet(_serve, _connect, timeout_s)
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


def _serve() -> tuple[TCPStore, int]:
    """A store on a port that the system chooses; it listens on all addresses before anybody hears of the port."""
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    return store, store.port


def _connect(host: str, port: int, timeout_s: float) -> TCPStore:
    try:
        return TCPStore(host, port, None, False, timedelta(seconds=timeout_s))
    except dist.DistError as error:
        raise ConnectionError(str(error).splitlines()[0]) from error


def _check_world_size(started: int, parallel_cfg: ParallelConfig) -> None:
    if started != parallel_cfg.world_size:
        raise DistributedError(
            f"{started} processes were started, but section `parallel` needs {parallel_cfg.world_size}: "
            f"tensor {parallel_cfg.tensor_model_parallel_size} x "
            f"pipeline {parallel_cfg.pipeline_model_parallel_size} x "
            f"context {parallel_cfg.context_parallel_size} x data {parallel_cfg.data_parallel_size}. "
            "Start that many, or change parallel.data_parallel_size"
        )


def shutdown() -> None:
    """Leave all process groups; afterwards `initialize` may be called again with other sizes."""
    from megatron.core import parallel_state

    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def is_data_parallel_leader() -> bool:
    """True on the one rank of each model replica that talks to the outside: tensor, context and pipeline rank 0."""
    from megatron.core import parallel_state

    return (
        parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.get_context_parallel_rank() == 0
        and parallel_state.get_pipeline_model_parallel_rank() == 0
    )


def data_parallel_rank() -> int:
    """Which model replica this rank belongs to."""
    from megatron.core import parallel_state

    return int(parallel_state.get_data_parallel_rank())


def device() -> torch.device:
    """Where this rank's parameters and batches live; nowhere while torch's default device is `meta`."""
    if torch.get_default_device().type == "meta":
        return torch.device("meta")
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
