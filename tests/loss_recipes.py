"""What may be combined in a loss, and one batch of it computed by the package and by the reference; holds no tests."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from megatron_rl.algorithms.losses import Sequences, policy_loss
from megatron_rl.algorithms.normalisation import NORMALISATIONS, BatchCounts, token_weights
from megatron_rl.algorithms.spec import LossSpec
from megatron_rl.algorithms.token_statistics import finalise_metrics, merge_statistics, token_statistics
from megatron_rl.policy.batch import SequenceBatch
from megatron_rl.policy.step_targets import accepted_tokens
from tests import reference_loss
from tests.loss_batches import Batch, Share, Split, ThreadSum, on_ranks
from tests.reference_loss import Recipe, Response

LOSSES: dict[str, dict[str, Any]] = {
    "ppo": {},
    "dual clip": {"loss": "ppo", "dual_clip": 3.0},
    "gspo": {"eps_low": 3e-4, "eps_high": 4e-4},
    "gspo_token": {"eps_low": 3e-4, "eps_high": 4e-4},
    "cispo": {"eps_low": 1.0, "eps_high": 2.0},
    "sapo": {},
    "gmpo": {},
    "opmd": {},
}
CORRECTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "tis": {"token_correction": "tis", "token_bounds": (0.0, 2.0)},
    "icepop": {"token_correction": "icepop", "token_bounds": (0.5, 5.0)},
    "mis": {"token_correction": "mis", "token_bounds": (0.5, 5.0)},
    "seq_mis": {"sequence_bounds": (0.5, 1.6)},
    "seq_mis and tis": {"sequence_bounds": (0.5, 1.6), "token_correction": "tis", "token_bounds": (0.0, 2.0)},
}
SEQUENCE_LEVEL = ("gspo", "gspo_token")


def recipes() -> dict[str, Recipe]:
    """Every allowed combination by its name."""
    return {
        f"{name}, {normalisation}, {correction}": Recipe(
            **{"loss": name, "normalisation": normalisation, "max_length": 7.0, **constants, **bounds}
        )
        for name, constants in LOSSES.items()
        for normalisation in (("seq_mean_token_mean",) if name in SEQUENCE_LEVEL else NORMALISATIONS)
        for correction, bounds in CORRECTIONS.items()
    }


KL_FORMS: list[dict[str, Any]] = [
    {"kl_coef": 0.3, "kl": "k3", "kl_unbiased": True},
    {"kl_coef": 0.3, "kl": "k2", "kl_unbiased": True},
    {"kl_coef": 0.3, "kl": "k3", "kl_unbiased": False},
    {"kl_coef": 0.3, "kl": "k2", "kl_unbiased": False},
    {"kl_coef": 0.0},
]
EXTRAS = st.builds(
    lambda kl, entropy_coef, renormalise: {**kl, "entropy_coef": entropy_coef, "renormalise": renormalise},
    st.sampled_from(KL_FORMS),
    st.sampled_from([0.05, 0.0]),
    st.booleans(),
)
"""What is combined with every recipe, as fields of it."""


def spec_of(recipe: Recipe) -> LossSpec:
    """The package's name for a recipe."""
    return LossSpec(
        kind=recipe.loss,
        eps_low=recipe.eps_low,
        eps_high=recipe.eps_high,
        dual_clip=recipe.dual_clip,
        kl_coef=recipe.kl_coef,
        kl_estimator=recipe.kl,
        kl_unbiased=recipe.kl_unbiased,
        entropy_coef=recipe.entropy_coef,
        correction=None if recipe.token_correction == "none" else recipe.token_correction,
        correction_bounds=None if recipe.token_correction == "none" else recipe.token_bounds,
        sequence_bounds=recipe.sequence_bounds,
    )


@dataclass(frozen=True)
class Found:
    """Of a whole batch, float64."""

    loss: float
    gradients: dict[str, np.ndarray]
    metrics: dict[str, float]
    sum_of_terms: float = 0.0
    """Of the reference only."""


def reference_of(batch: Batch, recipe: Recipe, policy: Mapping[str, np.ndarray], given_old: bool) -> Found:
    """The plain formulas; `policy` has `log_probs` and `entropy` [T]."""
    leaves = {name: torch.tensor(values, dtype=torch.float64, requires_grad=True) for name, values in policy.items()}
    return reference_from(batch, recipe, leaves, leaves["log_probs"], leaves["entropy"], given_old)


def reference_from(
    batch: Batch, recipe: Recipe, leaves: Mapping[str, Tensor], log_probs: Tensor, entropy: Tensor, given_old: bool
) -> Found:
    """The same with log-probs and entropy that are a function of `leaves`."""
    inputs = {n: torch.from_numpy(v) for n, v in batch.per_token(log_probs.detach().numpy()).items()}
    responses = [
        Response(
            log_probs[a:b],
            entropy[a:b],
            torch.from_numpy(batch.mask[a:b]),
            inputs["advantages"][a:b],
            inputs["old_log_probs"][a:b] if given_old else None,
            inputs["behaviour_log_probs"][a:b],
            inputs["reference_log_probs"][a:b],
        )
        for a, b in itertools.pairwise(batch.starts)
    ]
    result = reference_loss.evaluate(responses, recipe)
    gradients = {}
    for name, leaf in leaves.items():
        gradient = torch.autograd.grad(result.loss, leaf, retain_graph=True, allow_unused=True)[0]
        gradients[name] = np.zeros(leaf.shape) if gradient is None else gradient.numpy()
    return Found(float(result.loss.detach()), gradients, result.metrics, result.sum_of_terms)


def evaluate_split(
    batch: Batch, recipe: Recipe, policy: Mapping[str, np.ndarray], given_old: bool, split: Split
) -> Found:
    """The package on each share, put together again."""
    spec, inputs = spec_of(recipe), batch.per_token(policy["log_probs"])
    inputs["weights"] = weights_of(batch, recipe, policy["log_probs"])
    if not given_old:
        del inputs["old_log_probs"]
    loss, sums = 0.0, []
    gradients = {name: np.full(len(batch.mask), np.nan) for name in policy}
    for shares in split.shares(batch):

        def body(rank: int, reduce: ThreadSum | None, shares: list[Share] = shares) -> Any:
            return _evaluate_share(batch, spec, inputs, policy, shares[rank], reduce)

        for share, (part, found, statistics) in zip(shares, on_ranks(split.context, body), strict=True):
            loss += part
            sums.append(statistics)
            for name, gradient in found.items():
                gradients[name][share.rows[share.rows >= 0]] = gradient[share.rows >= 0]
                assert not gradient[share.rows < 0].any()
    return Found(loss, gradients, finalise_metrics(merge_statistics(sums), BatchCounts.of(batch.counts)))


def _evaluate_share(
    batch: Batch,
    spec: LossSpec,
    inputs: Mapping[str, np.ndarray],
    policy: Mapping[str, np.ndarray],
    share: Share,
    reduce: ThreadSum | None,
) -> tuple[float, dict[str, np.ndarray], dict[str, Tensor]]:
    tokens = {n: torch.from_numpy(share.take(v, 0.0 if n == "weights" else np.nan)) for n, v in inputs.items()}
    leaves = {n: torch.from_numpy(share.take(batch.soil(v), np.nan)).requires_grad_() for n, v in policy.items()}
    trainable = torch.from_numpy(share.take(batch.mask, False))
    sequences = sequences_of(batch, share, reduce)
    loss, flags = policy_loss(
        leaves["log_probs"], spec, entropy=leaves["entropy"], trainable=trainable, sequences=sequences, **tokens
    )
    del tokens["weights"], tokens["advantages"]
    detached = {name: leaf.detach() for name, leaf in leaves.items()}
    statistics = token_statistics(
        detached["log_probs"],
        trainable,
        flags=flags,
        entropy=detached["entropy"],
        spec=spec,
        sequences=sequences,
        **tokens,
    )
    gradients = {}
    for name, leaf in leaves.items():
        gradient = torch.autograd.grad(loss, leaf, retain_graph=True, allow_unused=True)[0]
        gradients[name] = np.zeros(len(leaf)) if gradient is None else gradient.numpy()
    return float(loss.detach()), gradients, statistics


def weights_of(batch: Batch, recipe: Recipe, log_probs: np.ndarray) -> np.ndarray:
    """[T] as the package counts them: over everything, before any split."""
    counts = batch.counts
    if recipe.renormalise:
        counts = accepted_tokens(_sequence_batch(batch, log_probs), spec_of(recipe))
    per_response = token_weights(recipe.normalisation, counts, recipe.max_length)
    return np.where(batch.mask, per_response[batch.response], 0.0)


def _sequence_batch(batch: Batch, log_probs: np.ndarray) -> SequenceBatch:
    """With one more token in front of each response, which nothing predicts."""
    inputs, fronts = batch.per_token(log_probs), batch.starts[:-1]
    return SequenceBatch(
        tokens=np.insert(np.zeros(len(batch.mask), dtype=np.int64), fronts, 0),
        offsets=batch.starts + np.arange(len(batch.starts)),
        mask=np.insert(batch.mask, fronts, False),
        temperature=np.ones(len(fronts), dtype=np.float32),
        sample_ids=tuple(map(str, range(len(fronts)))),
        old_log_probs=np.insert(inputs["old_log_probs"], fronts, np.nan),
        behaviour_log_probs=np.insert(inputs["behaviour_log_probs"], fronts, np.nan),
    )


def sequences_of(batch: Batch, share: Share, reduce: ThreadSum | None) -> Sequences:
    """What a sequence-level loss is told; an added response has no trainable token."""
    lengths = np.where(share.responses >= 0, batch.counts[share.responses], 0)
    return Sequences(torch.from_numpy(share.index), torch.from_numpy(lengths).double(), reduce)
