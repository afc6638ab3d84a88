"""What `bench_loss.py` compares: our operators, plain PyTorch, and other packages where they are installed; it times
nothing.

Every side of an operator computes the same numbers of the same tokens, with gradients by logits or by hidden states and
weight, and the full-vocabulary entropy: as a metric without gradient, or as a bonus in the loss. (A side that cannot
compute the entropy says so in its name.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl import kernels
from megatron_rl.algorithms.spec import LossSpec

EPS_LOW, EPS_HIGH, BONUS = 0.2, 0.28, 0.01
SEQUENCE = 256
"""Tokens of a sequence, for sides that only take rectangles."""

Step = Callable[[], Any]
"""Forward and backward once; what it returns is thrown away."""


class LeftOut(Exception):
    """A side cannot run here; the message says why."""


@dataclass(frozen=True)
class Case:
    """One comparison."""

    operator: str
    """A key of `SIDES`."""
    entropy: str
    """metric or bonus."""
    tokens: int
    vocab: int
    hidden: int
    device: str
    threads: int
    chunk: int
    """Rows of one chunk of logits in our linear operators."""

    def __str__(self) -> str:
        hidden = "" if self.operator in ("logprob", "logits") else f", H {self.hidden}, chunks of {self.chunk}"
        entropy = "" if self.operator == "forward" else f", entropy as a {self.entropy}"
        return f"{self.operator}: T {self.tokens}, V {self.vocab}{hidden}{entropy}"


class Problem:
    """The inputs that all sides share."""

    def __init__(self, case: Case, group: dist.ProcessGroup | None = None) -> None:
        self.case, self.group = case, group
        self.dtype = torch.bfloat16 if case.device == "cuda" else torch.float32
        self.width = case.vocab // (1 if group is None else dist.get_world_size(group))
        self.bonus = case.entropy == "bonus"
        generator = torch.Generator(case.device).manual_seed(0)

        def random(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.randn(*size, generator=generator, device=case.device, dtype=dtype)

        self.target = torch.randint(0, case.vocab, (case.tokens,), generator=generator, device=case.device)
        self.advantages = random(case.tokens).sign()
        self.old = -torch.full_like(self.advantages, float(case.vocab)).log() + 0.1 * random(case.tokens)
        self.weights = torch.full_like(self.old, 1.0 / case.tokens)
        if case.operator in ("logprob", "logits"):
            self.logits = random(case.tokens, self.width, dtype=self.dtype).requires_grad_()
            self.leaves = [self.logits]
        else:
            self.hidden = random(case.tokens, case.hidden, dtype=self.dtype).requires_grad_()
            self.weight = random(self.width, case.hidden, dtype=self.dtype).requires_grad_()
            self.leaves = [self.hidden, self.weight]

    def gradients(self, loss: Tensor) -> tuple[Tensor, ...]:
        """Of the loss by logits, or by hidden states and weight."""
        return torch.autograd.grad(loss, self.leaves)

    def plain_loss(self, log_probs: Tensor, entropy: Tensor | None = None) -> Tensor:
        """Clipped surrogate of given log-probs, in plain PyTorch."""
        ratio = (log_probs.float() - self.old).exp()
        clipped = ratio.clamp(1 - EPS_LOW, 1 + EPS_HIGH)
        loss = -(self.weights * torch.minimum(ratio * self.advantages, clipped * self.advantages)).sum()
        if entropy is not None and self.bonus:
            loss = loss - BONUS * (self.weights * entropy).sum()
        return loss

    def plain_sum(self, log_probs: Tensor, entropy: Tensor | None = None) -> Tensor:
        """No policy loss: log-probs times their advantages."""
        loss = (log_probs * self.advantages).sum()
        return loss + entropy.sum() if entropy is not None and self.bonus else loss

    @property
    def spec(self) -> LossSpec:
        """The same loss for our operators."""
        return LossSpec(eps_low=EPS_LOW, eps_high=EPS_HIGH, entropy_coef=BONUS if self.bonus else 0.0)


# ---------------------------------------------------------------------------------------------------------------- ours


def ours_log_probs(problem: Problem) -> Step:
    """`vocab_parallel_logprob` alone."""
    return lambda: problem.gradients(problem.plain_sum(*_vocab_parallel(problem)))


def ours_on_logits(problem: Problem) -> Step:
    """`vocab_parallel_logprob` and `policy_loss`."""
    return lambda: problem.gradients(_objective(problem, slice(None), *_vocab_parallel(problem)).loss)


def _vocab_parallel(problem: Problem) -> tuple[Tensor, Tensor | None]:
    return kernels.vocab_parallel_logprob(
        problem.logits,
        problem.target,
        group=problem.group,
        vocab_size=problem.case.vocab,
        with_entropy=True,
    )


def ours_from_hidden(problem: Problem) -> Step:
    """`linear_policy_loss`."""

    def step() -> Any:
        result = kernels.linear_policy_loss(
            problem.hidden,
            problem.weight,
            problem.target,
            objective=lambda rows, log_probs, entropy: _objective(problem, rows, log_probs, entropy),
            group=problem.group,
            vocab_size=problem.case.vocab,
            chunk_tokens=problem.case.chunk,
            with_entropy=True,
        )
        return problem.gradients(result.loss)

    return step


def ours_forward_only(problem: Problem) -> Step:
    """`linear_logprob`, for old and reference log-probs."""

    def step() -> Any:
        with torch.no_grad():
            return kernels.linear_logprob(
                problem.hidden,
                problem.weight,
                problem.target,
                group=problem.group,
                vocab_size=problem.case.vocab,
                chunk_tokens=problem.case.chunk,
                with_entropy=True,
            )

    return step


def _objective(problem: Problem, rows: slice | Tensor, log_probs: Tensor, entropy: Tensor | None) -> Any:
    return kernels.policy_loss(
        log_probs,
        problem.spec,
        weights=problem.weights[rows],
        old_log_probs=problem.old[rows],
        advantages=problem.advantages[rows],
        entropy=entropy if problem.bonus else None,
    )


# ------------------------------------------------------------------------------------------------------- plain PyTorch


def naive_log_probs(problem: Problem) -> Step:
    """log_softmax, gather and entropy in fp32, by autograd, and nothing else."""
    _alone(problem)
    return lambda: problem.gradients(
        problem.plain_sum(*_log_probs_and_entropy(problem.logits, problem.target, problem.bonus))
    )


def naive_on_logits(problem: Problem) -> Step:
    """log_softmax, gather and entropy in fp32, by autograd."""
    _alone(problem)
    return lambda: problem.gradients(_naive_loss(problem, problem.logits))


def naive_from_hidden(problem: Problem) -> Step:
    """All logits at once, then the same."""
    _alone(problem)
    return lambda: problem.gradients(_naive_loss(problem, problem.hidden @ problem.weight.t()))


def naive_forward_only(problem: Problem) -> Step:
    """All logits at once, without gradient."""
    _alone(problem)

    def step() -> Any:
        with torch.no_grad():
            return _log_probs_and_entropy(problem.hidden @ problem.weight.t(), problem.target, False)

    return step


def compiled(make: Callable[[Problem], Step]) -> Callable[[Problem], Step]:
    """A plain side with its loss compiled."""

    def build(problem: Problem) -> Step:
        _alone(problem)
        loss = torch.compile(_naive_loss, dynamic=False)
        if make is naive_on_logits:
            return lambda: problem.gradients(loss(problem, problem.logits))
        return lambda: problem.gradients(loss(problem, problem.hidden @ problem.weight.t()))

    return build


def three_products(problem: Problem) -> Step:
    """The three matrix products of a linear layer and nothing else: no loss can be faster."""

    def step() -> Any:
        logits = problem.hidden @ problem.weight.t()
        return logits @ problem.weight, logits.t() @ problem.hidden

    def without_graph() -> Any:
        with torch.no_grad():
            return step()

    return without_graph


def _naive_loss(problem: Problem, logits: Tensor) -> Tensor:
    return problem.plain_loss(*_log_probs_and_entropy(logits, problem.target, problem.bonus))


def _log_probs_and_entropy(logits: Tensor, target: Tensor, bonus: bool) -> tuple[Tensor, Tensor]:
    log_p = logits.float().log_softmax(-1)
    kept = log_p if bonus else log_p.detach()
    return log_p.gather(1, target.unsqueeze(1)).squeeze(1), -(kept.exp() * kept).sum(-1)


def _alone(problem: Problem) -> None:
    if problem.group is not None:
        raise LeftOut("would gather the whole vocabulary on every rank")


# ------------------------------------------------------------------------------------------------------ other packages


def megatron_on_logits(problem: Problem) -> Step:
    """Megatron-Core's fused cross-entropy, and our loss of its log-probs; no entropy."""
    cross_entropy, group = _megatron(problem)
    return lambda: problem.gradients(
        problem.plain_loss(-cross_entropy(problem.logits.unsqueeze(1), problem.target.unsqueeze(1), group).squeeze(1))
    )


def megatron_from_hidden(problem: Problem) -> Step:
    """All logits at once, then the same."""
    cross_entropy, group = _megatron(problem)

    def step() -> Any:
        logits = (problem.hidden @ problem.weight.t()).unsqueeze(1)
        return problem.gradients(problem.plain_loss(-cross_entropy(logits, problem.target.unsqueeze(1), group)[:, 0]))

    return step


def _megatron(problem: Problem) -> tuple[Callable[..., Tensor], dist.ProcessGroup]:
    if problem.bonus:
        raise LeftOut("has no entropy")
    try:
        from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
    except ImportError as error:
        raise LeftOut(f"not installed ({error})") from error
    if not dist.is_initialized():
        backend = "nccl" if problem.case.device == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    group = dist.group.WORLD if problem.group is None else problem.group
    assert group is not None
    return fused_vocab_parallel_cross_entropy, group


def liger_on_logits(problem: Problem) -> Step:
    """Liger-Kernel's GRPO loss in Triton; no entropy."""
    batch = _rectangle(problem)
    try:
        from liger_kernel.transformers.grpo_loss import triton_grpo_loss
    except ImportError as error:
        raise LeftOut(f"not installed ({error})") from error
    rows, extra = problem.case.tokens // batch, problem.logits.new_zeros(batch, 1, problem.width)
    # It wants one more position per sequence than it uses; the logits are made so, outside the measured step.
    logits = torch.cat([problem.logits.detach().view(batch, rows, -1), extra], 1).requires_grad_()

    def step() -> Any:
        per_token, _, _ = triton_grpo_loss(
            logits,
            problem.old.view(batch, rows),
            None,
            problem.target.view(batch, rows),
            problem.advantages.view(batch, rows)[:, 0].contiguous(),
            temperature=1.0,
            beta=0.0,
            eps_low=EPS_LOW,
            eps_high=EPS_HIGH,
            inplace=True,
        )
        return torch.autograd.grad((per_token * problem.weights.view(batch, rows)).sum(), logits)

    return step


def liger_from_hidden(problem: Problem) -> Step:
    """Liger-Kernel's chunked linear GRPO loss, one sequence at a time; no entropy."""
    batch = _rectangle(problem)
    try:
        from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss
    except ImportError as error:
        raise LeftOut(f"not installed ({error})") from error
    loss = LigerFusedLinearGRPOLoss(
        beta=0.0, use_ref_model=False, epsilon_low=EPS_LOW, epsilon_high=EPS_HIGH, loss_type="bnpo"
    )
    rows = problem.case.tokens // batch

    def step() -> Any:
        value, _ = loss(
            problem.hidden.view(batch, rows, -1),
            problem.weight,
            problem.target.view(batch, rows),
            torch.ones_like(problem.old.view(batch, rows)),
            problem.advantages.view(batch, rows)[:, 0].contiguous(),
            old_per_token_logps=problem.old.view(batch, rows),
        )
        return problem.gradients(value)

    return step


def _rectangle(problem: Problem) -> int:
    """Sequences of `SEQUENCE` tokens."""
    _alone(problem)
    if problem.bonus:
        raise LeftOut("has no entropy")
    if problem.target.device.type != "cuda":
        raise LeftOut("needs CUDA")
    if problem.case.tokens % SEQUENCE:
        raise LeftOut(f"takes sequences of equal length: make T a multiple of {SEQUENCE}")
    return problem.case.tokens // SEQUENCE


OURS, NAIVE, PRODUCTS = "ours", "naive PyTorch", "three bare products"
SIDES: dict[str, dict[str, Callable[[Problem], Step]]] = {
    "logprob": {OURS: ours_log_probs, NAIVE: naive_log_probs},
    "logits": {
        OURS: ours_on_logits,
        NAIVE: naive_on_logits,
        "torch.compile": compiled(naive_on_logits),
        "Megatron-Core (no entropy)": megatron_on_logits,
        "Liger (no entropy)": liger_on_logits,
    },
    "linear": {
        OURS: ours_from_hidden,
        NAIVE: naive_from_hidden,
        "torch.compile": compiled(naive_from_hidden),
        "Megatron-Core (no entropy)": megatron_from_hidden,
        "Liger (no entropy)": liger_from_hidden,
        PRODUCTS: three_products,
    },
    "forward": {OURS: ours_forward_only, NAIVE: naive_forward_only},
}
"""Operator -> side -> what builds it."""
