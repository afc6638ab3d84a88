"""The fused linear loss of every algorithm, cut and split in any way, has loss, gradients and metrics of the formulas.

The formulas run over full float64 logits; the operator runs as training calls it, in float32. Over tensor-parallel
ranks the same is tested in tests/parallel/test_loss_shards.py.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.loss_batches import batches, splits
from tests.loss_heads import Ranks, World, as_found, evaluate_heads, linear_reference
from tests.loss_recipes import EXTRAS, SEQUENCE_LEVEL, recipes, weights_of
from tests.reference_loss import Recipe
from tests.unit.test_loss_invariance import errors
from tests.worst import worst

RECIPES = recipes()


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@given(data=st.data())
@settings(max_examples=4, deadline=None)
def test_any_split_and_chunk_has_the_loss_gradients_and_metrics_of_the_formula(
    recipe: Recipe, data: st.DataObject
) -> None:
    batch = data.draw(batches(recipe.loss in SEQUENCE_LEVEL, recipe.sequence_bounds))
    full = replace(recipe, **data.draw(EXTRAS))
    given_old = full.renormalise or data.draw(st.booleans(), label="old log-probs are given")
    split = data.draw(splits(len(batch.lengths), even=True))
    ranks = Ranks(chunk_tokens=data.draw(st.sampled_from([1, 3, 8, 100]), label="rows of a chunk"))
    world = World.of(batch)
    expected, log_probs = linear_reference(batch, full, world, given_old)
    found = as_found(batch, evaluate_heads(batch, full, world, log_probs, given_old, split, ranks))
    assert np.isfinite(found.loss)
    assert not found.gradients["hidden"][~batch.mask].any()
    cancelled = 0.1 * float(np.abs(weights_of(batch, full, log_probs)).max())  # of opmd, whose terms differ by little
    assert worst(errors(found, expected, cancelled).values()) <= 1e-5, errors(found, expected, cancelled)
