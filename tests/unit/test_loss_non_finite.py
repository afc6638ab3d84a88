"""One bad number at a live row, through the fused operator as training calls it, for every loss and correction.

Nothing is raised, since other ranks are in the middle of their schedule; the row is marked, by which the update is
skipped and its sample named; every other response has the gradients that it has without the bad number.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_rl.policy.forward import LossHead, Projection
from tests.loss_batches import Batch, Split, batches
from tests.loss_heads import VOCAB, World, linear_reference, micro_batch
from tests.loss_recipes import KL_FORMS, recipes, spec_of, weights_of
from tests.reference_loss import Recipe

RECIPES = {name: recipe for name, recipe in recipes().items() if ", seq_mean_token_mean," in name}
READ_BY_ALL = ("hidden", "advantages", "old_log_probs", "behaviour_log_probs", "weights")


@dataclass(frozen=True)
class Seen:
    """What the head says of every row."""

    marked: np.ndarray
    d_hidden: np.ndarray


def run(batch: Batch, recipe: Recipe, world: World, inputs: dict[str, np.ndarray], chunk: int) -> Seen:
    weight = torch.from_numpy(world.weight).clone().requires_grad_()
    hidden = torch.from_numpy(world.hidden).clone().requires_grad_()
    head = LossHead(spec_of(recipe), Projection(VOCAB, None, False, chunk))
    [[share]] = Split((tuple(range(len(batch.lengths))),)).shares(batch)
    loss, _, report = head(micro_batch(batch, world, dict(inputs), share), weight, hidden[None])
    (d_hidden,) = torch.autograd.grad(loss, hidden)
    return Seen(report["non_finite"].numpy(), d_hidden.numpy())


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@given(data=st.data())
@settings(max_examples=3, deadline=None)
def test_a_bad_number_marks_its_row_and_touches_no_other_response(recipe: Recipe, data: st.DataObject) -> None:
    batch = data.draw(batches())
    live = np.flatnonzero(batch.mask)
    assume(len(live))
    full = replace(recipe, **data.draw(st.sampled_from(KL_FORMS)), entropy_coef=data.draw(st.sampled_from([0.0, 0.05])))
    where = data.draw(st.sampled_from([*READ_BY_ALL, *(["reference_log_probs"] if full.kl_coef else [])]))
    row = int(data.draw(st.sampled_from(live.tolist())))
    value = data.draw(st.sampled_from([np.nan, np.inf, -np.inf]))
    chunk = data.draw(st.sampled_from([1, 3, 100]))
    world = World.of(batch)
    _, log_probs = linear_reference(batch, full, world, True)
    inputs = batch.per_token(log_probs) | {"weights": weights_of(batch, full, log_probs).astype(np.float32)}
    clean = run(batch, full, world, inputs, chunk)
    assert not clean.marked.any()

    if where == "hidden":
        hidden = world.hidden.copy()
        hidden[row] = value
        world = replace(world, hidden=hidden)
    else:
        inputs[where] = np.where(np.arange(len(batch.mask)) == row, np.float32(value), inputs[where])
    dirty = run(batch, full, world, inputs, chunk)
    assert np.flatnonzero(dirty.marked).tolist() == [row]
    others = np.arange(len(batch.mask)) != row
    if spec_of(full).needs_sequences:
        others = batch.response != batch.response[row]
    # Not to the last bit: rows without a gradient are left out of the product, and which ones those are may change.
    np.testing.assert_allclose(dirty.d_hidden[others], clean.d_hidden[others], rtol=1e-5, atol=1e-6)
