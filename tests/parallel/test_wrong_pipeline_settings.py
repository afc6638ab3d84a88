"""The comparison with one rank can see the two settings with which Megatron-Core is silently wrong over gloo.

Both concern virtual pipeline stages; `policy.model` chooses the right ones. Each is switched to the wrong value here:

- batched sends: at PP 2 both neighbours are the same rank, so activations and gradients change places;
- deallocated outputs: the buffer of a pending send is given back. The policy's micro-batches differ in length, so
  ranks first exchange shapes, and a send then finds its receiver waiting: no wrong number has been seen. With one fixed
  length there is no such exchange, and the fault shows; a slower last stage lets the send be pending.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from megatron_rl.algorithms.spec import LossSpec
from megatron_rl.policy.batch import SequenceBatch
from megatron_rl.policy.microbatch import Plan
from tests.parallel.launch import run_ranks
from tests.parallel.policy_setup import VPP2, gradients, layout, make_config
from tests.tiny import tiny_model
from tests.worst import worst

pytestmark = pytest.mark.parallel

VOCAB, COUNT, LENGTH = 300, 6, 64
TOLERANCE = 1e-5
SLOWER_S = 0.03


@dataclass(frozen=True)
class Settings:
    """Changes to what `policy.model` passes to Megatron."""

    options: dict[str, bool] = field(default_factory=dict)
    fixed_length: bool = False


SETTINGS = {
    "own": Settings(),
    "own_fixed_length": Settings(fixed_length=True),
    "batched": Settings({"overlap_p2p_comm": False, "batch_p2p_comm": True}),
    "deallocated": Settings({"deallocate_pipeline_outputs": True}, fixed_length=True),
}


def run_settings(path: str) -> dict[str, dict[str, np.ndarray]]:
    """In a rank: gradients of one update without any split, then with each of the settings."""
    from megatron_rl.policy import distributed, forward

    with layout(make_config(path), alone=True):
        found = {"one_rank": _update(path, {}, Settings())}
    step = forward._forward_step

    def slower(*arguments: Any) -> Any:
        time.sleep(SLOWER_S * int(os.environ["RANK"]))
        return step(*arguments)

    forward._forward_step = slower
    for name, settings in SETTINGS.items():
        with layout(make_config(path, VPP2)):
            found[name] = _update(path, VPP2, settings)
    distributed.shutdown()
    return found


def _update(path: str, parallel: dict[str, Any], settings: Settings) -> dict[str, np.ndarray]:
    from megatron_rl.policy.policy import Policy

    policy = Policy.build(make_config(path, parallel))
    for chunk in policy.chunks:
        for name, value in settings.options.items():
            assert hasattr(chunk.config, name)
            setattr(chunk.config, name, value)
        chunk.config.variable_seq_lengths = not settings.fixed_length
    policy.train_step(_batch(), Plan((tuple((i,) for i in range(COUNT)),)), LossSpec())
    return gradients(policy)


def _batch() -> SequenceBatch:
    """Sequences of one length, one in each micro-batch."""
    rng = np.random.default_rng(0)
    masks = np.ones((COUNT, LENGTH), dtype=bool)
    masks[:, 0] = False
    return SequenceBatch.from_sequences(
        list(rng.integers(1, VOCAB, size=masks.shape)),
        list(masks),
        [f"s{i}" for i in range(COUNT)],
        advantages=rng.normal(size=masks.size).astype(np.float32),
        weights=np.where(masks, 1 / masks.sum(), 0).astype(np.float32).ravel(),
    )


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """Setting -> largest relative error of a gradient against one rank."""
    path = tiny_model(tmp_path_factory.mktemp("model"), vocab_size=VOCAB, layers=4)
    ranks = run_ranks(2, run_settings, str(path), timeout=240)
    expected = ranks[0]["one_rank"]
    return {name: worst(_error(rank[name], expected) for rank in ranks) for name in SETTINGS}


def _error(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    return worst(float(np.abs(found[n] - expected[n]).max() / np.abs(expected[n]).max()) for n in found)


@pytest.mark.parametrize("name", ["own", "own_fixed_length"])
def test_the_policys_own_settings_give_the_gradients_of_one_rank(name: str, errors: dict[str, float]) -> None:
    assert errors[name] <= TOLERANCE


@pytest.mark.parametrize("name", ["batched", "deallocated"])
def test_a_wrong_setting_is_seen(name: str, errors: dict[str, float]) -> None:
    assert not errors[name] <= 1000 * TOLERANCE  # or not a number
