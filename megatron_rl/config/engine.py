"""Section `engine:`, the generation servers that the run starts or talks to."""

from __future__ import annotations

from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from megatron_rl.files import regular

from .base import ConfigError, Processes, Seconds, Section

KEY_FILE = Path("endpoints") / "engine.key"
"""Below the run directory: the bearer token of the servers that the run starts."""

DECIDED = {
    "--model-path --model": "set model.path",
    "--dtype": "set engine.dtype",
    "--tp-size --tensor-parallel-size": "set engine.tp",
    "--dp-size --data-parallel-size": "set engine.dp",
    "--ep-size --expert-parallel-size --ep": "set engine.ep",
    "--pp-size --pipeline-parallel-size": "set engine.tp; weights are not sent to pipeline stages",
    "--nnodes --node-rank --dist-init-addr --nccl-init-addr": "set engine.nodes_per_replica",
    "--base-gpu-id": "the run deals out the devices: see cluster.placement",
    "--host --port": "the run chooses a free port on each node",
    "--api-key --admin-api-key": "set engine.api_key_file",
    "--config": "write what stands in that file into engine.extra_args",
}
"""SGLang's options that a run gives itself and counts on, when it sends weights above all, and what to do instead."""


class EngineConfig(Section):
    """Generation replicas that speak SGLang's HTTP protocol."""

    kind: Literal["embedded", "sglang"] = "embedded"
    """What the run starts. `embedded`: transformers on the CPU; `sglang`: SGLang (launch/install_sglang.sh)."""
    urls: list[str] = Field(default_factory=list)
    """Servers that already run; when given, none is started."""
    api_key_file: str | None = None
    """File with the bearer token of the servers, readable by you alone; null = a random one for each run."""
    replicas: Processes = 1
    """Servers to start."""
    max_running_requests: int = Field(512, ge=1)
    """Sequences that one server decodes at once."""
    dtype: Literal["float32", "bfloat16", "float8", "model"] = "model"
    """Number format of the server's weights; `model` = model.dtype. float8 (SGLang): matrices of layers in blocks of
    128 x 128 with scales, as in model.path; the rest, and what it computes in, is bfloat16."""
    ready_timeout_s: Seconds = 300.0
    """Deadline for a started server to answer."""
    silent_timeout_s: Seconds = 300.0
    """Silence after which a started server that runs is killed and started again (cluster.max_engine_restarts); longer
    than one server takes to load new weights, since it may answer nothing meanwhile."""
    update_timeout_s: Seconds = 600.0
    """Deadline of one weight update over all servers."""
    keep_versions: int = Field(2, ge=1)
    """Weight version directories kept on disk."""
    weight_transport: Literal["auto", "disk", "broadcast", "ipc"] = "auto"
    """How new weights reach the servers: files, process groups with the trainer, or memory of the devices they share.
    auto = broadcast on CUDA devices of their own, ipc on the trainer's, disk without CUDA or with engine.dp > 1."""
    bucket_mib: int = Field(512, ge=1)
    """Weights sent at once by broadcast and ipc, and size of one file on disk, MiB."""
    replicas_per_group: Processes = 8
    """Servers in one process group of a broadcast: a dead one costs its own group."""
    pause_mode: Literal["retract", "in_place"] = "retract"
    """Requests that run during a weight update: computed again with the new weights, or kept with their cache."""
    stage_in_memory: bool = False
    """Disk transport: one process of every engine node copies new weights to /dev/shm, its servers read them there."""
    probe_tolerance: float = Field(0.05, gt=0, le=1e6)
    """Largest difference of log-probs between servers, or to the trainer, of a short text after an update, nats."""

    python: str | None = None
    """SGLang: interpreter of its virtual environment; null = .venv-sglang/bin/python in the checkout."""
    untested_version: bool = False
    """SGLang: start although its version is not one that the tests ran with."""
    tp: Processes = 1
    """SGLang: tensor parallel size of one replica."""
    dp: Processes = 1
    """SGLang: data parallel size of one replica."""
    ep: Processes = 1
    """SGLang: expert parallel size of one replica."""
    nodes_per_replica: Processes = 1
    """SGLang: nodes that one replica spans; tp counts the devices of all of them."""
    memory_fraction: float | None = Field(None, gt=0, lt=1)
    """SGLang: share of a device's memory for weights and KV cache; null = what SGLang chooses."""
    context_length: int | None = Field(None, ge=1)
    """SGLang: longest sequence; null = rollout.max_prompt_tokens + rollout.max_response_tokens."""
    routed_experts: bool = False
    """Have the servers report which experts each token was routed to, and keep that for training."""
    extra_args: list[str] = Field(default_factory=list)
    """SGLang: further words of its command line, such as [--speculative-algorithm, EAGLE]; they win over ours, and may
    not be about model, number format, sizes, address or keys."""

    def weights_dtype(self, model_dtype: str) -> str:
        """In which the weights leave, as torch names it, where `model_dtype` is section `model`'s."""
        return {"model": model_dtype, "float8": "float8_e4m3fn"}.get(self.dtype, self.dtype)

    def compute_dtype(self, model_dtype: str) -> Literal["float32", "bfloat16"]:
        """In which the server computes, likewise."""
        return "float32" if self.weights_dtype(model_dtype) == "float32" else "bfloat16"

    def read_api_key(self, run_dir: str | Path) -> str | None:
        """The bearer token of the servers: that of `api_key_file`, else the run's own. None = they want none.

        Raises:
            ConfigError: `api_key_file` cannot be read, or is empty.
        """
        own = Path(run_dir) / KEY_FILE
        if self.api_key_file is None and (self.urls or not own.exists()):
            return None
        return read_key(Path(self.api_key_file or own), "engine.api_key_file")

    @field_validator("urls")
    @classmethod
    def _addresses(cls, urls: list[str]) -> list[str]:
        wrong = [url for url in urls if not _is_address(url)]
        if wrong:
            raise ValueError(f"{wrong[0]!r} is not the address of a server; write it as http://HOST:PORT")
        bare = [url.rstrip("/") for url in urls]
        if len(set(bare)) < len(bare):
            raise ValueError(f"{urls}: every server may stand once; remove the doubled one")
        return bare

    @field_validator("extra_args")
    @classmethod
    def _not_decided_elsewhere(cls, words: list[str]) -> list[str]:
        for word in words:
            option = word.partition("=")[0]
            for names, instead in DECIDED.items():
                # SGLang takes the beginning of a name for the name, as in --tp.
                if len(option) > 2 and any(name.startswith(option) for name in names.split()):
                    raise ValueError(f"{word} would override what the run counts on; leave it out, and {instead}")
        return words

    @model_validator(mode="after")
    def _only_for_sglang(self) -> EngineConfig:
        if self.kind == "embedded":
            if self.dtype == "float8":
                raise ValueError("dtype=float8 needs kind: sglang; the embedded engine knows no blocks of fp8")
            for name, field in type(self).model_fields.items():
                if (field.description or "").startswith("SGLang: ") and getattr(self, name) != field.get_default(
                    call_default_factory=True
                ):
                    raise ValueError(
                        f"{name}={getattr(self, name)} needs kind: sglang; it means nothing to the embedded engine"
                    )
        return self


def read_key(file: Path, name: str) -> str:
    """The bearer token in `file`, which `name` gives. Raises ConfigError when it cannot be one."""
    try:
        key = regular(file).read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name}={file}: cannot be read: {error}") from error
    if not key or not key.isascii() or len(key.split()) > 1:
        raise ConfigError(f"{name}={file}: must hold one word of ASCII characters, the key")
    return key


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is no number, or the brackets of an IPv6 address do not match
        return False
