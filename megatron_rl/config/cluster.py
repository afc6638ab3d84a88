"""Section `cluster:`, deadlines of the processes that make one run, and on Slurm their nodes and restarts."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from .base import Processes, Seconds, Section


class ClusterConfig(Section):
    """How long processes wait for each other; on Slurm, who runs where and how often the run is tried again."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where trainer ranks compute; auto = on CUDA devices where there are any."""
    device_memory_gib: float | None = Field(None, gt=0, le=1e6)
    """Memory of one device, GiB; with it --dry-run says whether its estimates fit. null = not compared."""
    collective_timeout_s: Seconds = 600.0
    """Deadline of one collective between trainer ranks."""
    start_timeout_s: Seconds = 300.0
    """Deadline for controller and engines to come up."""
    controller_timeout_s: Seconds = 120.0
    """Deadline of one answer of the controller to the trainer."""
    stop_timeout_s: Seconds = 30.0
    """Time given to a process to end by itself before it is killed."""
    max_engine_restarts: int = Field(3, ge=0)
    """How often an engine that died is started again within engine_restart_window_s; then the run goes on with the
    others, or ends without any."""
    engine_restart_window_s: Seconds = 3600.0
    """Restarts longer ago do not count."""

    placement: Literal["disaggregated", "colocated"] = "disaggregated"
    """Engines on GPUs (Slurm: nodes) of their own, or on those of the trainer, which then take turns."""
    trainer_nodes: Processes | None = None
    """Slurm: nodes of the trainer; null = as many as parallel.world_size needs at ranks_per_node."""
    ranks_per_node: Processes | None = None
    """Slurm: trainer ranks on one node; null = spread evenly over trainer_nodes; without those, one per GPU."""
    engine_nodes: Processes | None = None
    """Slurm: nodes of the engines; null = as many as engine.replicas needs at engines_per_node."""
    engines_per_node: Processes | None = None
    """Slurm: replicas on one node; null = 1, or spread evenly over engine_nodes when those are given."""
    spare_nodes: int = Field(0, ge=0, le=10_000)
    """Slurm: nodes of the allocation that wait for another one to fail."""
    controller_cpus: Processes = 2
    """Slurm: CPUs kept for the controller on the node of trainer rank 0."""
    min_dp: Processes | None = None
    """Slurm: least parallel.data_parallel_size to go on with when nodes are lost; null = as configured."""
    min_replicas: Processes | None = None
    """Slurm: least engine.replicas to go on with when nodes are lost; null = as configured."""
    max_restarts: int = Field(3, ge=0)
    """Slurm: restarts in the allocation, in a row, that bring no new checkpoint, before the job ends."""
    restart_pause_s: Seconds = 5.0
    """Slurm: pause before such a restart; doubled each time."""
    progress_timeout_s: Seconds = 1800.0
    """Slurm: longest time without a new row in metrics.jsonl before the run counts as hung and is restarted; until the
    first one, start_timeout_s longer."""
    save_timeout_s: Seconds = 300.0
    """Slurm: longest time from a signal to the end of the checkpoint; sbatch's --signal must come this early."""
    max_requeues: int = Field(100, ge=0)
    """Slurm: how often the job puts itself back into the queue; each needs a newer checkpoint than the one before."""
    srun_args: list[str] = Field(default_factory=list)
    """Slurm: more arguments for every srun, such as --container-image=..."""
