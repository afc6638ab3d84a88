"""Log-probs over a vocabulary that is split over ranks equal those of the whole, to the last bit on every rank."""

import pytest
import torch

from tests.parallel.launch import run_ranks

pytestmark = pytest.mark.parallel

ROWS, VOCAB = 37, 50
SHARDS = (2, 3)


def make_rows():
    """Logits of the true vocabulary with -inf and peaked rows, targets with masked ones, temperatures, gradients."""
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(ROWS, VOCAB, generator=generator)
    target = torch.randint(0, VOCAB, (ROWS,), generator=generator)
    logits[3] *= 40
    logits[5, :26] = -torch.inf  # all of the first shard
    target[5] = 40
    target[::6] = -1
    temperature = torch.rand(ROWS, generator=generator) + 0.5
    return logits, target, temperature, torch.randn(2, ROWS, generator=generator)


def pad(logits, shards):
    """Padding columns up to a multiple, as Megatron adds them; the last shard of three is nearly all padding."""
    width = (26 if shards == 2 else 24) * shards
    return torch.cat([logits, torch.full((ROWS, width - VOCAB), 70.0)], 1)


def evaluate(logits, target, temperature, grads, group):
    from megatron_rl.kernels import vocab_parallel_logprob

    leaf = logits.clone().requires_grad_()
    logp, entropy = vocab_parallel_logprob(
        leaf, target, group=group, temperature=temperature, vocab_size=VOCAB, with_entropy=True
    )
    (gradient,) = torch.autograd.grad((logp * grads[0] + entropy * grads[1]).sum(), leaf)
    return {"log_probs": logp.detach(), "entropy": entropy.detach(), "gradient": gradient}


def all_layouts():
    """Every rank: its results of each sharding and temperature, the collectives it made, and the error it saw."""
    import torch.distributed as dist

    from megatron_rl.kernels import vocab_parallel_logprob

    dist.init_process_group("gloo")
    results = {}
    logits, target, temperature, grads = make_rows()
    groups = {shards: dist.new_group(list(range(shards))) for shards in SHARDS}
    for shards, group in groups.items():
        if dist.get_rank() >= shards:
            continue
        part = pad(logits, shards).chunk(shards, 1)[dist.get_rank(group)]
        for name, t in (("one", 1.0), ("each", temperature)):
            results[shards, name] = evaluate(part, target, t, grads, group)
        results[shards, "collectives"] = count_collectives(lambda p=part, g=group: evaluate(p, target, 1.0, grads, g))
        try:
            vocab_parallel_logprob(part, target.clamp(min=VOCAB), group=group, vocab_size=VOCAB)
        except ValueError as error:
            results[shards, "error"] = str(error)
        nothing, _ = vocab_parallel_logprob(part, torch.full_like(target, -1), group=group, vocab_size=VOCAB)
        results[shards, "masked"] = nothing
    dist.destroy_process_group()
    return results


def count_collectives(function):
    """`(name, input elements)` of every collective that a call makes."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        function()
    return [event.name for event in profiler.events() if event.name.startswith("c10d::")]


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(max(SHARDS), all_layouts)


@pytest.fixture(scope="module")
def whole():
    logits, target, temperature, grads = make_rows()
    return {name: evaluate(logits, target, t, grads, None) for name, t in (("one", 1.0), ("each", temperature))}


layouts = pytest.mark.parametrize(
    ("shards", "name"), [(s, n) for s in SHARDS for n in ("one", "each")], ids=lambda value: str(value)
)


@layouts
@pytest.mark.parametrize("key", ["log_probs", "entropy"])
def test_results_are_equal_to_the_last_bit_on_every_rank(ranks, shards, name, key):
    first = ranks[0][shards, name][key]
    assert all(torch.equal(ranks[r][shards, name][key], first) for r in range(1, shards))


@layouts
@pytest.mark.parametrize("key", ["log_probs", "entropy"])
def test_results_equal_those_of_the_whole_vocabulary(ranks, whole, shards, name, key):
    torch.testing.assert_close(ranks[0][shards, name][key], whole[name][key], rtol=1e-6, atol=1e-6)


@layouts
def test_gradients_of_the_shards_are_that_of_the_whole(ranks, whole, shards, name):
    found = torch.cat([ranks[r][shards, name]["gradient"] for r in range(shards)], 1)
    wanted = whole[name]["gradient"]
    assert float((found[:, :VOCAB] - wanted).abs().max()) <= 1e-6 * float(wanted.abs().max())
    assert torch.all(found[:, VOCAB:] == 0)


@pytest.mark.parametrize("shards", SHARDS)
def test_one_gather_is_the_only_communication(ranks, shards):
    for rank in range(shards):
        assert len(ranks[rank][shards, "collectives"]) == 1
        assert "allgather" in ranks[rank][shards, "collectives"][0]


@pytest.mark.parametrize("shards", SHARDS)
def test_every_rank_refuses_an_id_outside_the_vocabulary(ranks, shards):
    assert all("=50 is outside the vocabulary" in ranks[r][shards, "error"] for r in range(shards))


@pytest.mark.parametrize("shards", SHARDS)
def test_without_a_live_row_all_ranks_return_zeros(ranks, shards):
    assert all(torch.equal(ranks[r][shards, "masked"], torch.zeros(ROWS)) for r in range(shards))
