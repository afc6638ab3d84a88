"""The words and the environment with which SGLang is started: pure functions of the options. Nothing starts here."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .sglang_cpu import SHIMS
from .sglang_install import Installed, SglangError

CPU_WORDS = (
    "--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch",
    "--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled", "--disable-overlap-schedule",
    "--sleep-on-idle",  # or its scheduler takes a whole core from the trainer while nothing is generated
)  # fmt: skip
CPU_TOKENS = 2**18
"""Most tokens of the KV cache on a CPU, where SGLang would take most of the machine's memory."""
DROPPED = ("PYTHONPATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE", "VIRTUAL_ENV")
"""Variables about our own Python; the last but one would have every start compile SGLang again."""


@dataclass(frozen=True)
class SglangOptions:
    """One replica, or one node's part of it. Raises ValueError (`SglangError`) for what does not fit together."""

    model: str
    """Hugging Face directory."""
    python: str
    """Interpreter of the environment that holds SGLang."""
    host: str = "127.0.0.1"
    port: int = 0
    """0 = any free one."""
    endpoint_file: str | None = None
    """Where {"url", "pid", "model"} is published once the server answers; removed at exit."""
    api_key: str | None = None
    """Bearer token wanted on all but the health routes."""
    weight_version: str = "default"
    weights_checksum: str | None = None
    """What /weights_checker must report as per_engine_checksum of these weights; None = anything."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    max_running_requests: int = 256
    context_length: int | None = None
    """Prompt and response together, and the tokens that SGLang keeps; None = the model's."""
    tp: int = 1
    dp: int = 1
    ep: int = 1
    memory_fraction: float | None = None
    deterministic: bool = False
    routed_experts: bool = False
    seed: int | None = None
    first_device: int = 0
    """Number of its first GPU on this node."""
    shares_devices: bool = False
    """Be able to give up device memory while a trainer uses it."""
    nodes: int = 1
    node_rank: int = 0
    head_file: str = ""
    """Where the first of several nodes publishes the address at which they meet."""
    extra_args: tuple[str, ...] = ()
    untested_version: bool = False
    ready_timeout_s: float = 300.0

    def __post_init__(self) -> None:
        if self.tp % self.nodes:
            raise SglangError(f"engine.tp={self.tp} is not a multiple of engine.nodes_per_replica={self.nodes}")


def command_line(
    options: SglangOptions, port: int, installed: Installed, secrets: Path | None, head: str | None
) -> list[str]:
    """What starts the server.

    Args:
        secrets: YAML file with the API keys.
        head: HOST:PORT at which the nodes of one replica meet; None for a single node.

    Raises:
        SglangError: the options ask for what this installation cannot do.
    """
    words = [options.python, "-m", "sglang.launch_server"]
    words += ["--model-path", options.model, "--host", options.host, "--port", str(port)]
    words += ["--weight-version", options.weight_version, "--dtype", options.dtype]
    words += ["--max-running-requests", str(options.max_running_requests)]
    words += _sizes(options)
    if options.memory_fraction is not None:
        words += ["--mem-fraction-static", str(options.memory_fraction)]
    if options.first_device:
        words += ["--base-gpu-id", str(options.first_device)]
    if options.shares_devices and not installed.for_cpu:
        words += ["--enable-memory-saver"]
    if options.context_length is not None:
        words += ["--context-length", str(options.context_length)]
    if options.seed is not None:
        words += ["--random-seed", str(options.seed)]
    if options.routed_experts:
        words += ["--enable-return-routed-experts"]
    if options.deterministic:
        words += ["--enable-deterministic-inference"]
    if head is not None:
        words += ["--nnodes", str(options.nodes), "--node-rank", str(options.node_rank), "--dist-init-addr", head]
    if installed.for_cpu:
        words += _cpu_words(options)
    if secrets is not None:
        words += ["--config", str(secrets)]
    return [*words, *options.extra_args]


def _sizes(options: SglangOptions) -> list[str]:
    sizes = {"--tp-size": options.tp, "--dp-size": options.dp, "--ep-size": options.ep}
    return [word for name, size in sizes.items() if size > 1 for word in (name, str(size))]


def _cpu_words(options: SglangOptions) -> list[str]:
    if options.deterministic:
        raise SglangError(
            "deterministic: SGLang has no deterministic attention on a CPU; set deterministic: false, or use "
            "engine.kind: embedded"
        )
    words = list(CPU_WORDS)
    if options.memory_fraction is None:
        longest = options.context_length or CPU_TOKENS
        words += ["--max-total-tokens", str(max(longest, min(CPU_TOKENS, longest * options.max_running_requests)))]
    return words


def environment(options: SglangOptions, installed: Installed, environ: Mapping[str, str]) -> dict[str, str]:
    """The server's environment, made from ours; `environ` is free of the variables of Slurm and MPI."""
    found = {name: value for name, value in environ.items() if name not in DROPPED}
    found["PYTHONUNBUFFERED"] = "1"
    # A context of a token or two more than the model was made for: SGLang needs them, no position uses them.
    found["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
    if installed.for_cpu:
        found |= {"PYTHONPATH": str(SHIMS), "SGLANG_USE_CPU_ENGINE": "1"}
        if options.tp > 1:
            found.setdefault("SGLANG_CPU_OMP_THREADS_BIND", _share_cpus(sorted(os.sched_getaffinity(0)), options.tp))
    return found


def _share_cpus(cpus: Sequence[int], ranks: int) -> str:
    """CPUs of each rank, in SGLang's form; SGLang's own rule wants a NUMA node for each.

    >>> _share_cpus([0, 1, 4, 5], 2)
    '0,4|1,5'
    """
    shares = [cpus[rank::ranks] or [cpus[rank % len(cpus)]] for rank in range(ranks)]
    return "|".join(",".join(map(str, share)) for share in shares)
