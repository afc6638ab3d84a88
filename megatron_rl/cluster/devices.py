"""Which GPUs of this machine the engines of a local run get, by UUID; on Slurm see `slurm/placement.py`.

    rank k of the trainer      device k of those that the run may use
    replica r, S devices each  colocated: devices r*S .. (r+1)*S - 1, shared with the ranks of these numbers
                               disaggregated: as many behind those of the trainer

UUIDs, because a process that sees a part of the devices numbers them anew: handles of memory that the trainer's rank on
a device passes to the engine's rank there are looked up by UUID.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence

from megatron_rl.config import Config, ConfigError

QUESTION = ("nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader")
TIMEOUT_S = 60.0
VISIBLE = "CUDA_VISIBLE_DEVICES"


def ask_driver() -> list[str]:
    """UUIDs of this machine's GPUs, in the driver's order; none without a driver."""
    try:
        answer = subprocess.run(QUESTION, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return answer.stdout.split()


def visible_devices(environ: Mapping[str, str], ask: Callable[[], list[str]] = ask_driver) -> list[str]:
    """UUIDs of the GPUs that a process with this environment sees, in its order.

    >>> visible_devices({"CUDA_VISIBLE_DEVICES": "2,GPU-b"}, lambda: ["GPU-a1", "GPU-b1", "GPU-c1"])
    ['GPU-c1', 'GPU-b1']
    """
    found = ask()
    if VISIBLE not in environ:
        return found
    named = []
    for word in filter(None, map(str.strip, environ[VISIBLE].split(","))):
        matching = found[int(word) : int(word) + 1] if word.isdigit() else [u for u in found if u.startswith(word)]
        if len(matching) != 1:
            break  # as CUDA reads it: what follows a wrong entry is not visible
        named += matching
    return named


def engine_devices(cfg: Config, visible: Sequence[str]) -> list[list[str]]:
    """The devices of each replica; of none where there are none, or the engines use none.

    Raises:
        ConfigError: there are too few.
    """
    engine, colocated = cfg.engine, cfg.cluster.placement == "colocated"
    if not visible or engine.kind != "sglang" or engine.urls:
        return [[] for _ in range(engine.replicas)]
    ranks = 0 if cfg.cluster.device == "cpu" else cfg.parallel.world_size or 1
    size, first = engine.tp * engine.dp, 0 if colocated else ranks
    wanted = first + engine.replicas * size
    if wanted > len(visible):
        trainer = "" if colocated else f" behind the {ranks} of the trainer"
        raise ConfigError(
            f"engine.replicas={engine.replicas} with engine.tp={engine.tp} x engine.dp={engine.dp} want "
            f"{engine.replicas * size} GPUs{trainer}, and this machine shows {len(visible)}: lower them, or let "
            "engines and trainer share devices with cluster.placement=colocated"
        )
    return [list(visible[first + r * size : first + (r + 1) * size]) for r in range(engine.replicas)]
