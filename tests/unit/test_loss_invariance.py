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
from tests.worst import worst

RECIPES = recipes()


def policy_of(batch: Batch) -> dict[str, np.ndarray]:
    rng = np.random.default_rng([batch.seed, 1])
    size = len(batch.mask)
    return {"log_probs": rng.uniform(-4.0, -0.1, size), "entropy": rng.uniform(0.0, 3.0, size)}


def errors(found: Found, expected: Found, floor: float = 0.0) -> dict[str, float]:
    """Of the loss relative to the sum of its terms, of a gradient to its largest entry, of a metric to 1 or itself.

    `floor` is the least that counts as a gradient's largest entry: where terms cancel, nothing but rounding is left.
    """
    assert found.metrics.keys() == expected.metrics.keys()
    result = {"loss": abs(found.loss - expected.loss) / (expected.sum_of_terms or 1.0)}
    for name, gradient in found.gradients.items():
        wanted = expected.gradients[name]
        result[name] = float(np.abs(gradient - wanted).max() / (max(np.abs(wanted).max(), floor) or 1.0))
    for name, value in expected.metrics.items():
        result[name] = abs(found.metrics[name] - value) / max(1.0, abs(value))
    return result


@st.composite
def situations(draw: st.DrawFn, recipe: Recipe) -> tuple[Batch, Recipe, bool, Split]:
    batch = draw(batches(recipe.loss in SEQUENCE_LEVEL, recipe.sequence_bounds))
    full = replace(recipe, **draw(EXTRAS))
    given_old = full.renormalise or draw(st.booleans(), label="old log-probs are given")
    return batch, full, given_old, draw(splits(len(batch.lengths)))


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
    assert worst(errors(found, expected).values()) <= 1e-9, errors(found, expected)
