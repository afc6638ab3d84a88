"""A loss of a user's own: found by `module:function`, and refused before the run when it is none."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from megatron_rl.algorithms.losses import HIGH, Sequences, policy_loss
from megatron_rl.algorithms.losses.registry import find_loss
from megatron_rl.algorithms.losses.trial import try_loss
from megatron_rl.algorithms.spec import LossSpec


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], str]]:
    """Writes a module and gives its name."""
    monkeypatch.syspath_prepend(str(tmp_path))
    name = f"losses_of_{tmp_path.name}"

    def write(code: str) -> str:
        (tmp_path / f"{name}.py").write_text("import torch\n" + textwrap.dedent(code))
        return name

    yield write
    sys.modules.pop(name, None)


def test_a_loss_with_flags_arguments_and_sums_over_sequences(module: Callable[[str], str]) -> None:
    name = module(
        """
        def mine(inputs, spec, *, scale):
            flags = (inputs.sequence_sum(1) > 2).to(torch.int8)
            return -scale * inputs.sequence_mean(0) * inputs.log_probs, flags

        def terms(inputs, spec):
            return torch.stack([inputs.advantages, torch.ones_like(inputs.advantages)])

        mine.sequence_terms = terms
        """
    )
    spec = LossSpec(kind=f"{name}:mine", args={"scale": 2.0})
    try_loss(spec)
    assert spec.needs_sequences
    log_probs = torch.tensor([-1.0, -2.0, -3.0, -4.0, -5.0], requires_grad=True)
    loss, flags = policy_loss(
        log_probs,
        spec,
        weights=torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0]),
        advantages=torch.tensor([1.0, 2.0, 3.0, 5.0, 9.0]),
        sequences=Sequences(torch.tensor([0, 0, 0, 1, 1]), torch.tensor([3.0, 1.0], dtype=torch.float64)),
    )
    loss.backward()
    assert loss.item() == -2 * (2.0 * -6.0 + 5.0 * -4.0)
    assert log_probs.grad.tolist() == [-4.0, -4.0, -4.0, -10.0, 0.0]
    assert flags.tolist() == [HIGH, HIGH, HIGH, 0, 0]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def other(inputs, spec): ...", "cannot be imported .*no attribute 'mine'"),
        ("import not_there_at_all", "cannot be imported .*not_there_at_all.*PYTHONPATH"),
        ("mine = 3", "'mine' is int, not a function"),
        ("def mine(inputs): ...", r"cannot be called as \(inputs, spec\)"),
        ("def mine(inputs, spec, *, width): ...", r"missing a required argument: 'width'.*algorithm.loss_args"),
        ("def mine(inputs, spec): raise RuntimeError('oh')", "failed on four tokens: RuntimeError: oh"),
        ("def mine(inputs, spec): return inputs.log_probs.sum()", r"returned \(\): expected one number per token"),
        ("def mine(inputs, spec): return inputs.advantages", "does not depend on inputs.log_probs"),
        ("def mine(inputs, spec): return inputs.log_probs, inputs.live", r"flags torch.bool \[4\]; expected int8"),
        ("def mine(inputs, spec): return inputs.log_probs.log()", "is not finite"),
        ("def mine(inputs, spec): return inputs.sequence_mean(0) * inputs.log_probs", "no sequence_terms"),
    ],
)
def test_what_is_no_loss_is_refused_before_the_run(module: Callable[[str], str], code: str, message: str) -> None:
    name = module(code)
    with pytest.raises(ValueError, match=f"loss='{name}:mine'.*{message}"):
        try_loss(LossSpec(kind=f"{name}:mine"))


def test_a_name_that_is_neither_built_in_nor_a_hook_is_refused_with_the_nearest() -> None:
    with pytest.raises(
        ValueError, match=r"loss='cispoo' is unknown \(did you mean 'cispo'\?\): use one of cispo, gmpo"
    ):
        find_loss("cispoo")
