"""The fused linear loss over several ranks: a split vocabulary, split rows, and split sequences; without Megatron.

Everything is compared with one rank that has the whole of it.
"""

import pytest
import torch

from tests.parallel.launch import run_ranks

pytestmark = pytest.mark.parallel

ROWS, WIDTH, VOCAB = 48, 16, 50
RANKS = (2, 3)
STARTS = [0, 5, 30]
FORMS = {
    "one chunk": {"chunk_tokens": 100},
    "chunks": {"chunk_tokens": 7},
    "long sequences": {"chunk_tokens": 7, "sequence_starts": STARTS},
}


def make_rows(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    random = lambda *size: torch.randn(*size, generator=generator)  # noqa: E731
    target = torch.randint(0, VOCAB, (ROWS,), generator=generator)
    target[::6] = -1
    return {
        "hidden": random(ROWS, WIDTH).to(dtype),
        "weight": (0.7 * random(VOCAB, WIDTH)).to(dtype),
        "target": target,
        "temperature": torch.rand(ROWS, generator=generator) + 0.5,
        "coefficients": random(2, ROWS),
    }


def objective_of(coefficients):
    from megatron_rl.kernels import PolicyLossOutput

    def objective(rows, log_probs, entropy):
        a, b = coefficients[:, rows].double()
        loss = (a * log_probs.double().sin() + b * entropy.double()).sum()
        d_log_probs = (a * log_probs.double().cos()).float()
        return PolicyLossOutput(loss, torch.zeros(len(rows), dtype=torch.int8), d_log_probs, b.float())

    return objective


def evaluate(rows, group=None, sequence_parallel=False, **options):
    """Loss and gradients of this rank's part of the weight (and of the rows, with sequence parallelism)."""
    import torch.distributed as dist

    from megatron_rl.kernels import linear_logprob, linear_policy_loss

    rank, ranks = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    padded = torch.nn.functional.pad(rows["weight"], (0, 0, 0, -VOCAB % ranks), value=3.0)
    hidden = rows["hidden"].chunk(ranks)[rank] if sequence_parallel else rows["hidden"]
    hidden, weight = (x.clone().requires_grad_() for x in (hidden, padded.chunk(ranks)[rank]))
    common = {"group": group, "temperature": rows["temperature"], "vocab_size": VOCAB}
    common |= {"sequence_parallel": sequence_parallel, "with_entropy": True}
    objective = objective_of(rows["coefficients"])
    found = linear_policy_loss(hidden, weight, rows["target"], objective=objective, **common, **options)
    found.loss.backward()
    options.pop("sequence_starts", None)
    log_probs, entropy = linear_logprob(hidden, weight, rows["target"], **common, **options)
    names = ("loss", "log_probs", "entropy", "d_hidden", "d_weight", "forward_log_probs", "forward_entropy")
    values = (found.loss, found.log_probs, found.entropy, hidden.grad, weight.grad, log_probs, entropy)
    return {name: value.detach() for name, value in zip(names, values, strict=True)}


def count_collectives(function):
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        function()
    return [event.name for event in profiler.events() if event.name.startswith("c10d::")]


def all_layouts():
    """In a rank: every form on every number of ranks it belongs to."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    results = {}
    groups = {ranks: dist.new_group(list(range(ranks))) for ranks in RANKS}
    for ranks, group in groups.items():
        if dist.get_rank() >= ranks:
            continue
        for form, options in FORMS.items():
            for parallel in (False, True):
                results[ranks, form, parallel] = evaluate(make_rows(), group, parallel, **options)
        results[ranks, "bf16"] = evaluate(make_rows(torch.bfloat16), group, True, **FORMS["chunks"])
        calls = [count_collectives(lambda p=p, g=group: evaluate(make_rows(), g, p, chunk_tokens=20)) for p in (0, 1)]
        results[ranks, "collectives"] = calls
        results[ranks, "split sequences"] = split_sequences(group)
    dist.destroy_process_group()
    return results


# ------------------------------------------------------------------------------------ sequences split over ranks


def sequence_loss(rows, mine, group, chunk):
    """GSPO of the rows `mine` of whole sequences of 6 rows a rank, their statistics summed over the group."""
    import torch.distributed as dist

    from megatron_rl.algorithms.losses import Sequences
    from megatron_rl.algorithms.spec import LossSpec
    from megatron_rl.kernels import linear_policy_loss, policy_loss

    def summed(values):
        if group is not None:
            dist.all_reduce(values, group=group)
        return values

    of = torch.arange(ROWS) // 12
    live = (rows["target"] >= 0).double()
    lengths = torch.zeros(ROWS // 12, dtype=torch.float64).index_add_(0, of, live)
    spec = LossSpec(kind="gspo", eps_low=10.0, eps_high=10.0)
    old, advantages = -4.0 + 0.3 * rows["coefficients"][0], rows["coefficients"][1]

    def objective(index, log_probs, _):
        whole = mine[index]
        return policy_loss(
            log_probs,
            spec,
            weights=torch.full((len(index),), 0.1),
            old_log_probs=old[whole],
            advantages=advantages[whole],
            sequences=Sequences(of[whole], lengths, None if group is None else summed),
        )

    hidden, weight = rows["hidden"][mine].requires_grad_(), rows["weight"].clone().requires_grad_()
    starts = list(range(0, len(mine), 12 * len(mine) // ROWS))
    options = {"chunk_tokens": chunk, "sequence_starts": starts, "equal_cuts": group is not None}
    found = linear_policy_loss(hidden, weight, rows["target"][mine], objective=objective, **options)
    found.loss.backward()
    return {"loss": found.loss.detach(), "d_weight": weight.grad}


def split_sequences(group):
    """Each rank has its share of every sequence; the last one's share of the first sequence is masked."""
    import torch.distributed as dist

    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    rows = make_rows()
    share = (torch.arange(ROWS) % 12) * ranks // 12
    rows["target"][(torch.arange(ROWS) < 12) & (share == ranks - 1)] = -1
    everything = torch.arange(ROWS)
    return {
        "whole": sequence_loss(rows, everything, None, 100),
        "part": sequence_loss(rows, everything[share == rank], group, 4),
    }


# ---------------------------------------------------------------------------------------------------------- the tests


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(max(RANKS), all_layouts)


@pytest.fixture(scope="module")
def whole():
    return evaluate(make_rows())


layouts = pytest.mark.parametrize(
    ("size", "form", "parallel"),
    [(size, form, parallel) for size in RANKS for form in FORMS for parallel in (False, True)],
    ids=lambda value: {False: "tp", True: "sp"}[value] if isinstance(value, bool) else str(value),
)


def close(found, wanted, tolerance=2e-6):
    assert float((found - wanted).abs().max()) <= tolerance * float(wanted.abs().max())


@layouts
def test_results_are_equal_to_the_last_bit_on_every_rank(ranks, size, form, parallel):
    first = ranks[0][size, form, parallel]
    for rank in ranks[1:size]:
        for name in ("loss", "log_probs", "entropy", "forward_log_probs", "forward_entropy"):
            assert torch.equal(rank[size, form, parallel][name], first[name]), name


@layouts
def test_results_equal_those_of_one_rank(ranks, whole, size, form, parallel):
    found = ranks[0][size, form, parallel]
    for name in ("loss", "log_probs", "entropy", "forward_log_probs", "forward_entropy"):
        close(found[name], whole[name])


@layouts
def test_gradients_equal_those_of_one_rank(ranks, whole, size, form, parallel):
    parts = [rank[size, form, parallel] for rank in ranks[:size]]
    hidden = torch.cat([part["d_hidden"] for part in parts]) if parallel else parts[-1]["d_hidden"]
    weight = torch.cat([part["d_weight"] for part in parts])
    close(hidden, whole["d_hidden"])
    close(weight[:VOCAB], whole["d_weight"])
    assert torch.all(weight[VOCAB:] == 0)


@pytest.mark.parametrize("size", RANKS)
def test_bf16_gradients_are_near(ranks, whole, size):
    parts = [rank[size, "bf16"] for rank in ranks[:size]]
    close(torch.cat([part["d_hidden"] for part in parts]).float(), whole["d_hidden"], 0.03)
    close(torch.cat([part["d_weight"] for part in parts])[:VOCAB].float(), whole["d_weight"], 0.03)


@pytest.mark.parametrize("size", RANKS)
def test_one_gather_a_chunk_and_the_hidden_states_own_is_all_communication(ranks, size):
    """Two chunks, in the loss and again in the log-probs alone."""
    tensor, sequence = ranks[0][size, "collectives"]
    names = lambda calls, part: [name for name in calls if part in name]  # noqa: E731
    assert (len(names(tensor, "allgather")), len(names(tensor, "allreduce")), len(tensor)) == (4, 1, 5)
    assert (len(names(sequence, "allgather")), len(names(sequence, "reduce_scatter")), len(sequence)) == (6, 1, 7)


@pytest.mark.parametrize("size", RANKS)
def test_sequences_split_over_ranks_have_the_ratio_of_the_whole(ranks, size):
    parts = [rank[size, "split sequences"] for rank in ranks[:size]]
    close(sum(part["part"]["loss"] for part in parts), parts[0]["whole"]["loss"], 1e-5)
    close(sum(part["part"]["d_weight"] for part in parts), parts[0]["whole"]["d_weight"], 1e-5)
