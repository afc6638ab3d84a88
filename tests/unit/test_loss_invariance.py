"""Every loss with every normalisation and correction, however the batch is split, is the plain float64 formula.

Split: into micro-batches and data-parallel ranks, in any packing order, over context-parallel ranks in zig-zag order,
with padding and fully masked responses added. Masked rows hold NaN and inf throughout.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.loss_batches import Batch, Split, batches, splits
from tests.loss_recipes import EXTRAS, SEQUENCE_LEVEL, Found, evaluate_split, recipes, reference_of
from tests.reference_loss import Recipe

RECIPES = recipes()


def policy_of(batch: Batch) -> dict[str, np.ndarray]:
    rng = np.random.default_rng([batch.seed, 1])
    size = len(batch.mask)
    return {"log_probs": rng.uniform(-4.0, -0.1, size), "entropy": rng.uniform(0.0, 3.0, size)}


def errors(found: Found, expected: Found) -> dict[str, float]:
    """Relative to the sum of terms, to the largest gradient, and to each metric; 0 for exact zeros."""
    assert found.metrics.keys() >= expected.metrics.keys()
    pairs = {name: (gradient, expected.gradients[name]) for name, gradient in found.gradients.items()}
    pairs |= {name: (np.array(found.metrics[name]), np.array(value)) for name, value in expected.metrics.items()}
    result = {name: _error(a, b, float(np.abs(b).max(initial=0.0))) for name, (a, b) in pairs.items()}
    return result | {"loss": _error(np.array(found.loss), np.array(expected.loss), expected.sum_of_terms)}


def _error(found: np.ndarray, expected: np.ndarray, scale: float) -> float:
    difference = float(np.abs(found - expected).max(initial=0.0))
    return difference / scale if difference else 0.0


@st.composite
def situations(draw: st.DrawFn, recipe: Recipe) -> tuple[Batch, Recipe, bool, Split]:
    batch = draw(batches(recipe.loss in SEQUENCE_LEVEL, recipe.sequence_bounds))
    full = replace(recipe, **draw(EXTRAS))
    return batch, full, draw(st.booleans(), label="old log-probs are given"), draw(splits(len(batch.lengths)))


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@given(data=st.data())
@settings(max_examples=8, deadline=None)
def test_any_split_has_the_loss_gradient_and_metrics_of_the_formula(recipe: Recipe, data: st.DataObject) -> None:
    batch, full, given_old, split = data.draw(situations(recipe))
    policy = policy_of(batch)
    expected = reference_of(batch, full, policy, given_old)
    found = evaluate_split(batch, full, policy, given_old, split)
    assert np.isfinite(found.loss)
    assert all(not gradient[~batch.mask].any() for gradient in found.gradients.values())
    assert max(errors(found, expected).values()) <= 1e-9, errors(found, expected)
