"""Which node does what: pure arithmetic on names and sizes. Slurm is asked in `allocation.py`, steps are in `steps.py`.

disaggregated   [trainer ...........][engines ......][spares]      colocated   [trainer and engines ...][spares]
                 ^ controller beside rank 0                                     ^ controller
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_rl.config import Config, ConfigError

_MOST_NODES = 2**16


@dataclass(frozen=True)
class NodeShape:
    """What every node of the allocation has."""

    cpus: int
    gpus: int = 0


@dataclass(frozen=True)
class Placement:
    """Who runs where in one attempt.

    Attributes:
        trainer: nodes of the trainer's ranks, rank 0 on the first.
        engines: nodes of the engines, replica 0 on the first; equal to the beginning of `trainer` when colocated.
        spares: nodes that do nothing.
        data_parallel_size: copies of the model, at most what is configured.
        replicas: engines, at most what is configured.
    """

    trainer: tuple[str, ...]
    engines: tuple[str, ...]
    spares: tuple[str, ...]
    world_size: int
    ranks_per_node: int
    data_parallel_size: int
    replicas: int
    engines_per_node: int
    shape: NodeShape
    controller_cpus: int

    @property
    def cpus_per_rank(self) -> int:
        """CPUs of one trainer rank, those of the controller left out."""
        return max(1, (self.shape.cpus - self.controller_cpus) // self.ranks_per_node)

    def rows(self) -> list[tuple[str, str, str]]:
        """(role, nodes, what runs there), for people."""
        rows = [
            ("trainer", ",".join(self.trainer), f"{self.world_size} ranks, up to {self.ranks_per_node} a node"),
            ("controller", self.trainer[0], f"{self.controller_cpus} CPUs"),
        ]
        if self.engines:
            rows.append(("engines", ",".join(self.engines), self._engines_in_words()))
        return [*rows, ("spare", ",".join(self.spares), "")] if self.spares else rows

    def _engines_in_words(self) -> str:
        count, span = self.replicas, len(self.engines) // self.replicas
        where = f"each on {span} nodes" if span > 1 else f"up to {self.engines_per_node} a node"
        return f"{count} {'replica' if count == 1 else 'replicas'}, {where}"


@dataclass(frozen=True)
class Need:
    """How many nodes the configuration asks for, and how densely they are filled."""

    trainer: int
    engines: int
    spares: int
    ranks_per_node: int
    engines_per_node: int
    colocated: bool

    @property
    def nodes(self) -> int:
        """All of them, without the spares."""
        return max(self.trainer, self.engines) if self.colocated else self.trainer + self.engines

    def __str__(self) -> str:
        joint = "shared by" if self.colocated else "="
        spare = f" + {self.spares} spare" if self.spares else ""
        return f"{self.nodes + self.spares} nodes ({joint} {self.trainer} trainer, {self.engines} engines{spare})"


def need(cfg: Config, shape: NodeShape) -> Need:
    """Nodes of each role, derived where section `cluster` says null.

    Raises:
        ConfigError: the sizes contradict each other.
    """
    c, world = cfg.cluster, cfg.parallel.world_size or 1
    spread = math.ceil(world / c.trainer_nodes) if c.trainer_nodes else shape.gpus or world
    ranks = c.ranks_per_node or spread
    trainer = c.trainer_nodes or math.ceil(world / ranks)
    problems = []
    if not (trainer - 1) * ranks < world <= trainer * ranks:
        problems.append(
            f"{trainer} trainer nodes with {ranks} ranks each do not fit {world} ranks (section parallel): change "
            "cluster.trainer_nodes or cluster.ranks_per_node, or leave one of them out"
        )
    if shape.gpus and ranks > shape.gpus and c.device != "cpu":
        problems.append(f"{ranks} trainer ranks on a node of {shape.gpus} GPUs: raise cluster.trainer_nodes")
    replicas = 0 if cfg.engine.urls else cfg.engine.replicas
    span = cfg.engine.nodes_per_replica
    per_node = c.engines_per_node or math.ceil(replicas * span / (c.engine_nodes or replicas * span or 1)) or 1
    engines = math.ceil(replicas * span / per_node)
    if span > 1 and per_node > 1:
        problems.append(
            f"engine.nodes_per_replica={span} needs whole nodes, but cluster.engines_per_node or engine_nodes puts "
            f"{per_node} replicas on one: leave them out"
        )
    if c.engine_nodes is not None and c.engine_nodes != engines:
        problems.append(
            f"cluster.engine_nodes={c.engine_nodes}, but engine.replicas={replicas} at {per_node} a node fill "
            f"{engines}: change one of them, or leave engine_nodes out"
        )
    problems += _too_many_devices(cfg, per_node, shape)
    if shape.cpus < c.controller_cpus + ranks:
        problems.append(
            f"{shape.cpus} CPUs on a node are too few for {ranks} trainer ranks and cluster.controller_cpus="
            f"{c.controller_cpus}: ask for more (--cpus-per-task, --exclusive), or lower one of them"
        )
    needed = Need(trainer, engines, c.spare_nodes, ranks, per_node, c.placement == "colocated")
    if needed.nodes + needed.spares > _MOST_NODES:
        problems.append(f"{needed} are more than {_MOST_NODES}, the most of a job: lower the sizes")
    if problems:
        raise ConfigError("the configuration does not fit the nodes:\n" + "\n".join(f"  - {p}" for p in problems))
    return needed


def _too_many_devices(cfg: Config, per_node: int, shape: NodeShape) -> list[str]:
    """A complaint when the replicas of one node want more GPUs than it has."""
    e = cfg.engine
    wanted = math.ceil(per_node * e.tp * e.dp / e.nodes_per_replica)
    if e.kind != "sglang" or e.urls or cfg.cluster.device == "cpu" or not 0 < shape.gpus < wanted:
        return []
    return [
        f"{per_node} replicas on a node with engine.tp={e.tp} x engine.dp={e.dp} over engine.nodes_per_replica="
        f"{e.nodes_per_replica} want {wanted} GPUs of it, and it has {shape.gpus}: raise cluster.engine_nodes or "
        "engine.nodes_per_replica, or lower engine.tp"
    ]


def plan_rows(cfg: Config, cpus: int, gpus: int) -> list[tuple[str, str, str]]:
    """Which nodes would do what, and how to ask for them: for a plan before there is an allocation.

    Raises:
        ConfigError: the sizes contradict each other.
    """
    shape = NodeShape(cpus, gpus)
    needed = need(cfg, shape)
    count = needed.nodes + needed.spares
    rows = place(cfg, needed, [f"node{i}" for i in range(1, count + 1)], shape).rows()
    options = f"--nodes={count}" + (f" --gpus-per-node={gpus}" if gpus else "")
    return [*rows, ("submit", f"sbatch {options} launch/train.sbatch ...", f"nodes of {cpus} CPUs, {gpus} GPUs")]


def require_allocation(needed: Need, nodes: Sequence[str]) -> None:
    """Refuse an allocation that has too few nodes, or some that would stand idle unasked. Raises ConfigError."""
    wanted = needed.nodes + needed.spares
    if len(nodes) != wanted:
        more = len(nodes) - needed.nodes
        other = f", or set cluster.spare_nodes={more}" if more >= 0 else ", or ask for less in section cluster"
        raise ConfigError(
            f"the allocation has {len(nodes)} nodes ({','.join(nodes)}), the configuration needs {needed}: "
            f"submit with `sbatch --nodes={wanted}`{other}"
        )


def place(
    cfg: Config, needed: Need, nodes: Sequence[str], shape: NodeShape, strikes: Mapping[str, int] | None = None
) -> Placement:
    """Give nodes to the roles; with too few of them, shrink as far as min_dp and min_replicas allow.

    Args:
        nodes: usable ones, in Slurm's order: a step's tasks are numbered by it, whatever order srun is told.
        strikes: how often an attempt failed on a node; those with most are the spares.

    Raises:
        ConfigError: there are too few nodes even so.
    """
    for replicas, dp in _sizes(cfg):
        ranks = cfg.parallel.model_parallel_size * dp
        trainer = math.ceil(ranks / needed.ranks_per_node)
        engines = math.ceil(replicas * cfg.engine.nodes_per_replica / needed.engines_per_node)
        count = max(trainer, engines) if needed.colocated else trainer + engines
        if count > len(nodes):
            continue
        best = set(sorted(nodes, key=lambda node: (strikes or {}).get(node, 0))[:count])
        used = tuple(node for node in nodes if node in best)
        first = 0 if needed.colocated else trainer
        return Placement(
            trainer=used[:trainer],
            engines=used[first : first + engines],
            spares=tuple(node for node in nodes if node not in best),
            world_size=ranks,
            ranks_per_node=needed.ranks_per_node,
            data_parallel_size=dp,
            replicas=replicas,
            engines_per_node=needed.engines_per_node,
            shape=shape,
            controller_cpus=cfg.cluster.controller_cpus,
        )
    raise ConfigError(
        f"{len(nodes)} usable nodes are left ({','.join(nodes) or 'none'}), too few for {needed}: raise "
        "cluster.spare_nodes, or allow less with cluster.min_dp and cluster.min_replicas"
    )


def _sizes(cfg: Config) -> list[tuple[int, int]]:
    """(replicas, data_parallel_size) that may be run with, the configured ones first, then engines before trainer."""
    full_dp, full = cfg.parallel.data_parallel_size, 0 if cfg.engine.urls else cfg.engine.replicas
    least, least_dp = cfg.cluster.min_replicas or full, cfg.cluster.min_dp or full_dp
    samples = cfg.rollout.samples_per_step // cfg.algorithm.updates_per_batch
    dps = [full_dp, *(dp for dp in range(full_dp - 1, least_dp - 1, -1) if samples % dp == 0)]
    return [(replicas, dp) for dp in dps for replicas in range(full, min(least, full) - 1, -1)]
