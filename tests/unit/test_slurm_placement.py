"""Which node does what on Slurm: derived sizes, refusals, and what is left when nodes are lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import assume, given
from hypothesis import strategies as st

from megatron_rl.cluster.slurm.placement import NodeShape, Placement, need, place, plan_rows, require_allocation
from megatron_rl.config import Config, ConfigError, load_config
from tests.least import least

ROOT = Path(__file__).resolve().parents[2]
GPU_NODE = NodeShape(cpus=96, gpus=8)


def configuration(cluster: dict[str, Any] | None = None, **sections: Any) -> Config:
    return least(cluster=cluster or {}, **sections)


def names(count: int) -> list[str]:
    return [f"node{i}" for i in range(1, count + 1)]


def placed(cfg: Config, count: int, shape: NodeShape = GPU_NODE) -> Placement:
    return place(cfg, need(cfg, shape), names(count), shape)


def test_gpus_decide_how_many_nodes_the_trainer_needs() -> None:
    cfg = configuration(parallel={"tensor_model_parallel_size": 8, "data_parallel_size": 3}, engine={"replicas": 2})
    found = placed(cfg, 5)
    assert (found.trainer, found.engines, found.spares) == (("node1", "node2", "node3"), ("node4", "node5"), ())
    assert (found.world_size, found.ranks_per_node, found.cpus_per_rank) == (24, 8, 11)


def test_without_gpus_ranks_are_spread_over_the_nodes_that_are_given() -> None:
    cfg = configuration({"trainer_nodes": 2}, parallel={"data_parallel_size": 4})
    found = placed(cfg, 3, NodeShape(16))
    assert (len(found.trainer), found.ranks_per_node, found.cpus_per_rank) == (2, 2, 7)


def test_engines_share_the_nodes_of_the_trainer_when_colocated() -> None:
    cfg = configuration(
        {"placement": "colocated", "engines_per_node": 2},
        parallel={"data_parallel_size": 16},
        engine={"replicas": 4},
    )
    found = placed(cfg, 2)
    assert found.trainer == found.engines == ("node1", "node2")


def test_a_replica_may_span_nodes() -> None:
    engine = {"kind": "sglang", "replicas": 2, "tp": 16, "nodes_per_replica": 2}
    cfg = configuration(parallel={"data_parallel_size": 8}, engine=engine)
    assert placed(cfg, 5).rows()[-1] == ("engines", "node2,node3,node4,node5", "2 replicas, each on 2 nodes")
    with pytest.raises(ConfigError, match=r"engine\.nodes_per_replica=2 needs whole nodes"):
        need(configuration({"engines_per_node": 2}, parallel={"data_parallel_size": 8}, engine=engine), GPU_NODE)


def test_replicas_that_want_more_gpus_than_their_node_has_are_refused() -> None:
    engine: dict[str, Any] = {"kind": "sglang", "replicas": 5, "tp": 2}
    refused = configuration({"engine_nodes": 1}, parallel={"data_parallel_size": 8}, engine=engine)
    with pytest.raises(ConfigError, match=r"5 replicas .*engine\.tp=2 .* want 10 GPUs of it, and it has 8"):
        need(refused, GPU_NODE)
    assert need(refused, NodeShape(cpus=96)).engines == 1  # nodes without GPUs: engines on CPUs
    one = configuration(parallel={"data_parallel_size": 8}, engine={"kind": "sglang", "tp": 16})
    with pytest.raises(ConfigError, match="want 16 GPUs of it, and it has 8"):
        need(one, GPU_NODE)


def test_more_nodes_than_a_job_can_have_are_refused() -> None:
    cfg = configuration(engine={"kind": "sglang", "replicas": 10_000, "tp": 56, "nodes_per_replica": 7})
    with pytest.raises(ConfigError, match=r"70000 engines.* are more than 65536"):
        plan_rows(cfg, cpus=96, gpus=8)


def test_engines_that_run_already_need_no_node() -> None:
    cfg = configuration(parallel={"data_parallel_size": 8}, engine={"urls": ["http://there:1"]})
    assert placed(cfg, 1).engines == ()
    assert [role for role, *_ in placed(cfg, 1).rows()] == ["trainer", "controller"]


@pytest.mark.parametrize(
    ("cluster", "sections", "complaint"),
    [
        ({"trainer_nodes": 3, "ranks_per_node": 8}, {"parallel": {"data_parallel_size": 8}}, "3 trainer nodes with 8"),
        ({"trainer_nodes": 1}, {"parallel": {"data_parallel_size": 16}}, "16 trainer ranks on a node of 8 GPUs"),
        ({"trainer_nodes": 4}, {"parallel": {"data_parallel_size": 5}}, "4 trainer nodes with 2 ranks each do not fit"),
        ({"engine_nodes": 4, "engines_per_node": 2}, {"engine": {"replicas": 4}}, "cluster.engine_nodes=4, but"),
        ({"controller_cpus": 90}, {}, "96 CPUs on a node are too few for 8 trainer ranks"),
    ],
)
def test_sizes_that_contradict_each_other_are_named(
    cluster: dict[str, Any], sections: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        need(configuration(cluster, **sections), GPU_NODE)


@pytest.mark.parametrize(
    ("count", "advice"), [(2, "or ask for less in section cluster"), (5, r"or set cluster.spare_nodes=2")]
)
def test_an_allocation_of_another_size_is_refused_with_the_number_to_ask_for(count: int, advice: str) -> None:
    cfg = configuration({"trainer_nodes": 2}, parallel={"data_parallel_size": 16})
    with pytest.raises(ConfigError, match=rf"the configuration needs 3 nodes \(= 2 trainer, 1 engines\).*{advice}"):
        require_allocation(need(cfg, GPU_NODE), names(count))
    require_allocation(need(cfg, GPU_NODE), names(3))


def test_a_plan_says_how_to_ask_for_the_nodes() -> None:
    cfg = configuration({"spare_nodes": 1}, parallel={"data_parallel_size": 16})
    assert plan_rows(cfg, 96, 8)[-1][1] == "sbatch --nodes=4 --gpus-per-node=8 launch/train.sbatch ..."


def test_the_profile_for_gpu_nodes_can_be_extended(tmp_path: Path) -> None:
    mine = {"extends": str(ROOT / "configs" / "h100.yaml"), "run_dir": "r", "model": {"path": "m"}}
    mine |= {"data": {"prompts": "p"}, "reward": {"components": [{"name": "math"}]}}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(mine))
    rows = plan_rows(load_config(tmp_path / "mine.yaml"), cpus=96, gpus=8)
    assert [(role, len(nodes.split(","))) for role, nodes, _ in rows[:3]] == [
        ("trainer", 2),
        ("controller", 1),
        ("engines", 2),
    ]


def test_engines_are_given_up_before_copies_of_the_model() -> None:
    cluster = {"min_dp": 1, "min_replicas": 1}
    cfg = configuration(cluster, parallel={"data_parallel_size": 24}, engine={"replicas": 3})
    sizes = [(p.replicas, p.data_parallel_size) for p in (placed(cfg, count) for count in (6, 5, 4, 3, 2))]
    assert sizes == [(3, 24), (2, 24), (1, 24), (1, 16), (1, 8)]
    with pytest.raises(ConfigError, match="1 usable nodes are left"):
        placed(cfg, 1)


def test_a_spare_takes_the_place_of_the_node_that_failed_and_slurm_s_order_is_kept() -> None:
    cfg = configuration({"spare_nodes": 1}, parallel={"data_parallel_size": 16})
    found = place(cfg, need(cfg, GPU_NODE), names(4), GPU_NODE, {"node1": 1})
    assert (found.trainer, found.engines, found.spares) == (("node2", "node3"), ("node4",), ("node1",))
    found = place(cfg, need(cfg, GPU_NODE), names(3), GPU_NODE, {"node1": 1})
    assert (found.trainer, found.engines, found.spares) == (("node1", "node2"), ("node3",), ())


def test_nothing_shrinks_unless_allowed() -> None:
    cfg = configuration(parallel={"data_parallel_size": 16}, engine={"replicas": 2})
    with pytest.raises(ConfigError, match=r"3 usable nodes are left .*cluster.min_dp and cluster.min_replicas"):
        placed(cfg, 3)


def test_a_smaller_data_parallel_size_divides_the_samples_of_an_update() -> None:
    cfg = configuration(
        {"min_dp": 1, "ranks_per_node": 1},
        parallel={"data_parallel_size": 4},
        rollout={"groups_per_step": 2, "group_size": 2},
    )
    assert placed(cfg, 4).data_parallel_size == 2  # three nodes are left to the trainer, but 3 does not divide 4


@given(
    mp=st.sampled_from([1, 2, 4, 8]),
    dp=st.integers(1, 8),
    replicas=st.integers(1, 6),
    per_node=st.integers(1, 4),
    spares=st.integers(0, 2),
    lost=st.integers(0, 6),
    colocated=st.booleans(),
)
def test_whatever_is_placed_fits(
    mp: int, dp: int, replicas: int, per_node: int, spares: int, lost: int, colocated: bool
) -> None:
    cluster = {"engines_per_node": per_node, "spare_nodes": spares, "min_dp": 1, "min_replicas": 1}
    cluster |= {"placement": "colocated" if colocated else "disaggregated"}
    cfg = configuration(
        cluster,
        parallel={"tensor_model_parallel_size": mp, "data_parallel_size": dp},
        engine={"replicas": replicas},
        rollout={"groups_per_step": 840, "group_size": 2},
    )
    needed = need(cfg, GPU_NODE)
    total = needed.nodes + needed.spares
    assume(lost < total)
    try:
        found = place(cfg, needed, names(total - lost), GPU_NODE)
    except ConfigError:
        assert lost > spares
        return
    assert found.world_size == mp * found.data_parallel_size
    assert len(found.trainer) * found.ranks_per_node >= found.world_size > (len(found.trainer) - 1) * 8
    assert len(found.engines) * per_node >= found.replicas >= 1
    assert colocated or not set(found.trainer) & set(found.engines)
    used = {*found.trainer, *found.engines}
    assert used.isdisjoint(found.spares)
    assert used | set(found.spares) == {*names(total - lost)}
    if lost <= spares:
        assert (found.data_parallel_size, found.replicas) == (dp, replicas)
