"""The loss with Transformer Engine's parallel cross entropy, which a stand-in of its signature plays here.

The stand-in is `torch.nn.functional.cross_entropy`: what is tested is everything around the call, i.e. temperature,
padding, masking, chunks and signs. tests/gpu calls the real one.
"""

import sys
import types

import pytest
import torch

from megatron_rl.kernels import PolicyLossOutput
from megatron_rl.kernels.linear_pass import LiveRows
from megatron_rl.kernels.shard import Shard
from megatron_rl.kernels.te_pass import TePass
from tests.unit.test_linear_loss import TOLERANCE, assert_equal, fused, make_case, naive, objective_of


@pytest.fixture(autouse=True)
def transformer_engine(monkeypatch):
    def parallel_cross_entropy(logits, target, label_smoothing, reduce_loss, group):
        assert logits.dim() == 3
        assert target.shape == logits.shape[:2]
        assert target.numel() > 0, "a kernel cannot be launched over no rows"
        assert (label_smoothing, reduce_loss, group) == (0.0, False, None)
        return torch.nn.functional.cross_entropy(logits[0], target[0], reduction="none")[None]

    for name in ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.cross_entropy"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["transformer_engine.pytorch.cross_entropy"].parallel_cross_entropy = parallel_cross_entropy


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("whole", [False, True], ids=["any cut", "whole sequences"])
def test_loss_and_gradients_equal_float64_autograd(dtype, whole):
    case = make_case(1, dtype=dtype)
    starts = case.starts if whole else None
    found = fused(case, with_entropy=False, chunk_tokens=8, sequence_starts=starts, logprob_backend="te")
    assert found.entropy is None
    assert_equal(found, naive(case, with_entropy=False), TOLERANCE[dtype])


def test_rows_without_a_gradient_get_none():
    case = make_case(2)
    case.coefficients[:, ::2] = 0.0
    found = fused(case, with_entropy=False, logprob_backend="te")
    assert_equal(found, naive(case, with_entropy=False), TOLERANCE[torch.float64])
    assert torch.all(found.d_hidden[::2] == 0)


def test_chunks_without_a_live_row_take_part_in_the_objective_alone():
    """Context-parallel ranks have them where others have live rows of the same sequences."""
    case = make_case(1)
    case.target[case.starts[1] : case.starts[2]] = -1
    calls = []
    found = fused(
        case,
        with_entropy=False,
        objective=objective_of(case, False, calls),
        chunk_tokens=1,
        sequence_starts=case.starts,
        equal_cuts=True,
        logprob_backend="te",
    )
    assert [] in calls
    assert_equal(found, naive(case, with_entropy=False), TOLERANCE[torch.float64])


def test_a_rank_with_padding_alone_leaves_the_others_their_numbers(monkeypatch):
    """Two ranks as Transformer Engine merges them, each by its maximum and its sum of exponentials."""
    case = make_case(3, masked=0.0)
    logits = case.hidden @ case.weight[: case.vocab].t()
    expected = logits.log_softmax(1).gather(1, case.target[:, None]).squeeze(1)

    def merged(mine, target, label_smoothing, reduce_loss, group):
        parts = [(x.amax(1), (x - x.amax(1, keepdim=True)).exp().sum(1)) for x in (logits, mine[0])]
        top = torch.maximum(parts[0][0], parts[1][0])
        total = sum(count * (largest - top).exp() for largest, count in parts)
        return (top + total.log() - logits.gather(1, target[0][:, None]).squeeze(1))[None]

    module = sys.modules["transformer_engine.pytorch.cross_entropy"]
    monkeypatch.setattr(module, "parallel_cross_entropy", merged)
    width = case.weight.shape[0]
    live = LiveRows(
        torch.zeros_like(case.weight),
        Shard(None, 1, 2, width, valid=0),
        torch.arange(len(case.target)),
        case.target - width,
        None,
        len(case.target),
        False,
    )
    objective = lambda rows, log_probs, _: PolicyLossOutput(  # noqa: E731
        log_probs.sum().double(), torch.zeros(len(rows), dtype=torch.int8), torch.ones_like(log_probs), None
    )
    run = TePass(live, case.hidden, objective, False, (True, True), None)
    run.add((0, len(case.target)))
    torch.testing.assert_close(run.log_probs, expected)
    assert run._d_hidden.abs().max() == 0
    assert run._d_weight.abs().max() == 0
