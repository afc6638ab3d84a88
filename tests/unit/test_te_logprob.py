"""The loss with Transformer Engine's parallel cross entropy, which a stand-in of its signature plays here.

The stand-in is `torch.nn.functional.cross_entropy`: what is tested is everything around the call, i.e. temperature,
padding, masking, chunks and signs. tests/gpu calls the real one.
"""

import sys
import types

import pytest
import torch

from megatron_rl.kernels import linear_policy_loss
from tests.unit.test_linear_loss import TOLERANCE, assert_equal, fused, make_case, naive, objective_of


@pytest.fixture(autouse=True)
def transformer_engine(monkeypatch):
    def parallel_cross_entropy(logits, target, label_smoothing, reduce_loss, group):
        assert logits.dim() == 3
        assert target.shape == logits.shape[:2]
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


def test_an_entropy_is_refused():
    case = make_case(0)
    with pytest.raises(ValueError, match="te' has no entropy"):
        linear_policy_loss(
            case.hidden,
            case.weight,
            case.target,
            objective=objective_of(case),
            with_entropy=True,
            logprob_backend="te",
            **case.options(),
        )
