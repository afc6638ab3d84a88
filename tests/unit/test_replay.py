"""Routers with given experts: their weights and gradients, what is recomputed, and where routes find their rows."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.config.hf_experts import MoeShape
from megatron_rl.policy.batch import SequenceBatch
from megatron_rl.policy.packing import RowShare, pack
from megatron_rl.policy.routes import ArrayRoutes, local_routes

EXPERTS, TOP_K, HIDDEN = 8, 3, 16
KINDS: dict[str, MoeShape] = {
    "softmax of the chosen": MoeShape(EXPERTS, TOP_K, HIDDEN),
    "softmax of all": MoeShape(EXPERTS, TOP_K, HIDDEN, normalise_top_k=False),
    "sigmoid, bias, groups, scale": MoeShape(
        EXPERTS,
        TOP_K + 1,
        HIDDEN,
        score_function="sigmoid",
        scaling_factor=2.5,
        num_groups=4,
        top_groups=2,
        expert_bias=True,
    ),
}


def build(shape: MoeShape, layers: int = 1) -> tuple[torch.nn.Module, Any]:
    """A chunk that has nothing but routers, and its `Routing`."""
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.moe.router import TopKRouter

    from megatron_rl import cpu_backend
    from megatron_rl.policy.replay import Routing

    cpu_backend.install()
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=HIDDEN,
        num_attention_heads=1,
        num_moe_experts=shape.num_experts,
        moe_router_topk=shape.top_k,
        moe_router_score_function=shape.score_function,
        moe_router_pre_softmax=not shape.normalise_top_k,
        moe_router_num_groups=shape.num_groups,
        moe_router_group_topk=shape.top_groups,
        moe_router_topk_scaling_factor=shape.scaling_factor,
        moe_router_enable_expert_bias=shape.expert_bias,
        moe_router_load_balancing_type="none",
        add_bias_linear=False,
        use_cpu_initialization=True,
    )
    groups = SimpleNamespace(tp=None, cp=None, tp_cp=None, tp_dp_cp=None)
    routers = [TopKRouter(config, groups) for _ in range(layers)]
    for number, router in enumerate(routers, start=1):
        router.set_layer_number(number)
        if router.expert_bias is not None:
            router.expert_bias.copy_(torch.linspace(-0.3, 0.3, shape.num_experts))
    chunk = torch.nn.ModuleList(routers)
    hf: Any = SimpleNamespace(moe=shape, moe_layers=tuple(range(layers)))
    return chunk, Routing([chunk], hf, (0, 1))


def batch_of(lengths: list[int]) -> SequenceBatch:
    return SequenceBatch.from_sequences(
        [np.arange(n) for n in lengths],
        [[0] + [1] * (n - 1) for n in lengths],
        [f"s{i}" for i in range(len(lengths))],
    )


def all_routes(batch: SequenceBatch, values: np.ndarray) -> ArrayRoutes:
    """Routes [layers, T, k] of every token of `batch`."""
    return ArrayRoutes(range(len(values)), batch.offsets, np.arange(batch.num_tokens), values)


def random_sets(rng: np.random.Generator, rows: int, shape: MoeShape) -> np.ndarray:
    return np.stack([rng.permutation(shape.num_experts)[: shape.top_k] for _ in range(rows)]).astype(np.int16)


def reference_gates(logits: torch.Tensor, sets: torch.Tensor, shape: MoeShape) -> torch.Tensor:
    """g_e = 1[e in S] s_e / sum_S s_j (or s_e alone), times the scale; float64 [rows, experts]."""
    scores = logits.softmax(-1) if shape.score_function == "softmax" else logits.sigmoid()
    chosen = torch.zeros_like(scores).scatter(1, sets, 1.0)
    gates = chosen * scores
    if shape.normalise_top_k:
        gates = gates / gates.sum(-1, keepdim=True)
    return gates * shape.scaling_factor


@pytest.mark.parametrize("kind", KINDS)
def test_weights_and_their_gradient_are_those_of_the_live_scores_over_the_given_set(kind):
    shape, rng = KINDS[kind], np.random.default_rng(0)
    chunk, routing = build(shape)
    batch = batch_of([9])
    sets = random_sets(rng, 9, shape)
    sets[3] = -1  # nothing given: live
    microbatch = pack(batch, [0])
    logits = torch.from_numpy(rng.normal(size=(8, 1, EXPERTS)).astype(np.float32)).requires_grad_()
    with routing.begin(batch, replay=all_routes(batch, sets[None]), backward=True) as run:
        with run.forward(microbatch, chunk):
            gates, chosen = chunk[0].routing(logits)
        gates.square().sum().backward()
    with torch.no_grad():
        _, live = chunk[0].routing(logits)
    expected = torch.from_numpy(np.where(sets[:8] >= 0, sets[:8], 0)).long()
    expected[3] = live[3].nonzero().flatten()
    assert torch.equal(chosen, torch.zeros_like(chosen).scatter(1, expected, True))
    assert not torch.equal(chosen, live)
    exact = logits.detach().squeeze(1).double().requires_grad_()
    wanted = reference_gates(exact, expected, shape)
    wanted.square().sum().backward()
    assert (gates.double() - wanted).abs().max() < 1e-6
    assert (logits.grad.squeeze(1).double() - exact.grad).abs().max() < 1e-6
    assert exact.grad.abs().sum(-1).min() > 1e-4  # the router learns from every row, replayed or not


def test_a_recomputed_layer_uses_the_sets_of_its_forward_pass_in_the_order_of_micro_batches():
    shape = KINDS["softmax of the chosen"]
    chunk, routing = build(shape)
    batch = batch_of([6, 5])
    rng = np.random.default_rng(1)
    logits = [torch.from_numpy(rng.normal(size=(n, 1, EXPERTS))).float() for n in (5, 4)]
    with routing.begin(batch, backward=True) as run:
        first = []
        for i in range(2):  # as 1F1B does: two forward passes before the first backward one
            with run.forward(pack(batch, [i]), chunk), torch.no_grad():
                first.append(chunk[0].routing(logits[i])[1])
        again = [chunk[0].routing(-logits[i])[1] for i in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(chunk[0].routing(-logits[0])[1], first[0])  # outside of a pass: live


def test_a_forward_pass_that_is_not_recomputed_is_told():
    chunk, routing = build(KINDS["softmax of the chosen"])
    batch = batch_of([6])
    with (
        pytest.raises(RuntimeError, match="1 router passes were not recomputed"),
        routing.begin(batch, backward=True) as run,
        run.forward(pack(batch, [0]), chunk),
        torch.no_grad(),
    ):
        chunk[0].routing(torch.zeros(5, 1, EXPERTS))


def test_what_is_recorded_is_what_the_routers_chose_and_replays_bit_for_bit():
    shape = KINDS["softmax of the chosen"]
    chunk, routing = build(shape, layers=2)
    batch = batch_of([4, 1, 7, 3])
    rng = np.random.default_rng(2)
    logits = [torch.from_numpy(rng.normal(size=(10, 1, EXPERTS))).float() for _ in range(2)]
    microbatches = [(pack(batch, [2, 1]), slice(0, 6)), (pack(batch, [0, 3], RowShare(1, 4)), slice(0, 8))]

    def run_all(**options: Any) -> tuple[Any, list[Any]]:
        found = []
        with routing.begin(batch, **options) as run, torch.no_grad():
            for microbatch, rows in microbatches:
                with run.forward(microbatch, chunk):
                    found += [router.routing(x[rows]) for router, x in zip(chunk, logits, strict=True)]
        return run, found

    run, live = run_all(record=True)
    old = run.recorded()
    assert [old.rows(i, [0, 1], 0, n - 1).shape[1] for i, n in enumerate(batch.lengths)] == [3, 0, 6, 2]
    chosen = old.rows(2, [1], 0, 6)[0]
    assert torch.equal(live[1][1].nonzero()[:, 1].view(6, TOP_K), torch.from_numpy(np.sort(chosen)).long())
    logits = [x.roll(1, 0) for x in logits]
    _, moved = run_all(replay=old)
    real = [6, 6, 5, 5]  # the rest is padding, which routes live
    assert all(torch.equal(a[1][:n], b[1][:n]) for a, b, n in zip(live, moved, real, strict=True))
    logits = [x.roll(-1, 0) for x in logits]
    _, same = run_all(replay=old.select([0, 1, 2, 3]))
    assert all(torch.equal(a[0], b[0]) for a, b in zip(live, same, strict=True))


def test_a_rank_without_sequences_routes_its_dummy_rows_live_and_counts_none():
    shape = KINDS["softmax of the chosen"]
    chunk, routing = build(shape)
    empty = batch_of([4]).select([])
    routes = all_routes(empty, np.zeros((1, 0, TOP_K), np.int16))
    microbatch = pack(empty, [], RowShare(1, 4))
    logits = torch.from_numpy(np.random.default_rng(3).normal(size=(4, 1, EXPERTS))).float()
    with routing.begin(empty, replay=routes, compare={"engine": routes}, record=True) as run, torch.no_grad():
        with run.forward(microbatch, chunk):
            _, chosen = chunk[0].routing(logits)
        assert torch.equal(chosen, chunk[0].routing(logits)[1])
    assert run.tally.rows.sum() == run.tally.fallbacks.sum() == run.tally.load.sum() == 0
    assert run.recorded()._values.shape == (1, 0, TOP_K)


def test_megatrons_list_of_all_routers_of_the_process_stays_empty():
    from megatron.core.transformer.moe.router_replay import RouterReplay

    build(KINDS["softmax of the chosen"], layers=3)
    assert RouterReplay.global_router_replay_instances == []


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    shards=st.sampled_from([1, 2, 4]),
    context=st.sampled_from([(1, 0), (2, 0), (2, 1)]),
    seed=st.integers(0, 2**16),
)
def test_each_row_gets_the_route_of_the_token_that_it_reads(lengths, shards, context, seed):
    rng = np.random.default_rng(seed)
    batch = batch_of(lengths)
    order = rng.permutation(len(lengths)).tolist()
    values = rng.integers(0, EXPERTS, size=(3, batch.num_tokens, TOP_K)).astype(np.int16)
    routes = all_routes(batch, values)
    size, rank = context
    microbatch = pack(batch, order, RowShare(2 * size if size > 1 else 1, 2 * size * shards, size, rank))
    tokens = microbatch.tokens[0].numpy()
    for part in np.split(np.arange(microbatch.num_rows), shards):
        destination = microbatch.destination[part]
        found = local_routes(routes, [2, 0], batch.offsets, destination, TOP_K, EXPERTS)
        real = destination >= 0
        assert (found[:, ~real] == -1).all()
        assert (found[:, real] == values[[2, 0]][:, destination[real] - 1]).all()
        assert (tokens[part][real] == batch.tokens[destination[real] - 1]).all()


def test_routes_move_with_their_sequences():
    batch = batch_of([3, 5, 2])
    values = np.arange(10 * TOP_K, dtype=np.int16).reshape(1, 10, TOP_K)
    batch = dataclasses.replace(
        batch, routes=all_routes(batch, values), routing_mismatch=np.array([0, 0.5, 1], np.float32)
    )
    chosen = batch.select([2, 1])
    assert chosen.routing_mismatch.tolist() == [1, 0.5]
    assert (chosen.routes.rows(1, [0], 1, 4) == values[:, 4:7]).all()
    assert (chosen.select([1]).routes.rows(0, [0], 0, 2) == values[:, 3:5]).all()


def test_rows_of_another_rank_and_routes_of_another_model_are_refused():
    batch = batch_of([6])
    half = ArrayRoutes([1], batch.offsets, np.arange(3), np.zeros((1, 3, TOP_K), np.uint8))
    with pytest.raises(ValueError, match=r"rows 0 to 5 of sequence 0 were not routed on this rank: .* the same plan"):
        local_routes(half, [1], batch.offsets, np.arange(1, 6), TOP_K, EXPERTS)
    with pytest.raises(ValueError, match="not routed on this rank"):
        half.rows(0, [0], 0, 2)
    for top_k, experts in ((TOP_K + 1, EXPERTS), (TOP_K, 5)):
        routes = all_routes(batch, np.full((1, 6, TOP_K), 5, np.int16))
        with pytest.raises(ValueError, match="they come from another model"):
            local_routes(routes, [0], batch.offsets, np.arange(1, 6), top_k, experts)


def test_the_load_is_of_the_experts_that_compute_and_mismatch_and_entropy_of_the_routers_own_choice():
    shape = MoeShape(EXPERTS, 1, HIDDEN, normalise_top_k=False)
    chunk, routing = build(shape)
    batch = batch_of([9])
    routes = all_routes(batch, np.full((1, 9, 1), 5, np.int16))
    logits = torch.zeros(8, 1, EXPERTS)
    logits[..., 2] = 1.0
    with routing.begin(batch, replay=routes, compare={"engine": routes}) as run, run.forward(pack(batch, [0]), chunk):
        chunk[0].routing(logits)
    assert run.tally.load[0].tolist() == [0, 0, 0, 0, 0, 8, 0, 0]
    assert run.tally.differing["engine"].tolist() == [[8, 0]]
    exact = torch.special.entr(logits[0, 0].double().softmax(-1)).sum()
    assert run.tally.entropy.tolist() == pytest.approx([8 * float(exact)], rel=1e-6)


def test_a_pass_that_reports_nothing_counts_nothing_and_recomputes_all_the_same():
    from megatron_rl.policy.routing import Routers

    shape = KINDS["softmax of the chosen"]
    chunk, _ = build(shape)
    hf: Any = SimpleNamespace(moe=shape, moe_layers=(0,))
    moe = SimpleNamespace(routing_replay="R3", max_routing_mismatch=None)
    routers = Routers([chunk], hf, SimpleNamespace(moe=moe, parallel=SimpleNamespace(sequence_parallel=False)))
    batch = batch_of([6])
    logits = torch.from_numpy(np.random.default_rng(4).normal(size=(5, 1, EXPERTS))).float()
    with routers.updating(batch, replays=False) as run:
        with run.forward(pack(batch, [0]), chunk), torch.no_grad():
            first = chunk[0].routing(logits)[1]
        assert torch.equal(chunk[0].routing(-logits)[1], first)
    assert routers.metrics(run) == {}  # without a collective, too: there is no process group here


def test_sets_differ_only_by_their_members_and_only_real_rows_count():
    from megatron_rl.policy.routing_tally import Tally

    tally = Tally([4], EXPERTS, 2, ("engine",), torch.device("cpu"))
    live = torch.tensor([[0, 1], [2, 3], [4, 5], [6, 7], [0, 7]])
    given = torch.tensor([[1, 0], [2, 4], [-1, -1], [7, 6], [1, 2]])
    sequence = torch.tensor([0, 0, 1, 1, 2])  # the last row is padding
    even = torch.full((5, EXPERTS), 1 / EXPERTS)
    tally.add(4, even, live, live, sequence, {"engine": given}, given)
    assert tally.known["engine"][0, :2].tolist() == [2, 1]
    assert tally.differing["engine"][0, :2].tolist() == [1, 0]
    assert tally.rows.tolist() == [4]
    assert tally.fallbacks.tolist() == [1]
    assert tally.load[0].tolist() == [1] * 8
    assert tally.entropy.tolist() == pytest.approx([4 * np.log(EXPERTS)], rel=1e-6)
