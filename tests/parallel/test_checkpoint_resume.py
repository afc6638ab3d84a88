"""Saving in one layout and going on in another gives the losses of the run that was never interrupted."""

from __future__ import annotations

import random
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from megatron_rl.algorithms.spec import LossSpec
from megatron_rl.policy import checkpoint
from tests.parallel.launch import run_ranks
from tests.parallel.policy_setup import CP2, DP2, PP2, TP2, layout, local_part, make_batch, make_config
from tests.tiny import tiny_model

pytestmark = pytest.mark.parallel

VOCAB = 300
SPEC = LossSpec(kl_coef=0.1)
BEFORE, AFTER = 3, 2
COMPARED = ("policy/loss", "policy/entropy", "policy/kl_reference", "optimizer/grad_norm")
WHOLE = {"use_distributed_optimizer": False}
INTERLEAVED = PP2 | {"virtual_pipeline_model_parallel_size": 2}
WRITERS = {
    "tp2": TP2,
    "dp2": DP2,
    "cp2": CP2,
    "pp2_tied": PP2,
    "interleaved": INTERLEAVED,
    "tp2_whole": TP2 | WHOLE,
    "tp2_bf16": TP2,
}
READERS = {
    "tp2": {"tp2": TP2, "pp2": PP2, "dp2_whole": DP2 | WHOLE, "one_rank": {}},
    "dp2": {"dp2": DP2, "tp2": TP2},
    "cp2": {"cp2": CP2, "pp2": PP2},
    "pp2_tied": {"pp2": PP2, "tp2": TP2},
    "interleaved": {"interleaved": INTERLEAVED, "dp2": DP2},
    "tp2_whole": {"tp2": TP2 | WHOLE, "dp2_distributed": DP2},
    "tp2_bf16": {"tp2": TP2, "dp2": DP2, "tp2_whole": TP2 | WHOLE},
}


def _config(paths: dict[bool, str], writer: str, parallel: dict[str, Any]) -> Any:
    dtype = "bfloat16" if "bf16" in writer else "float32"
    return make_config(
        paths["tied" in writer],
        parallel,
        dtype,
        algorithm={"kl_coef": 0.1},
        optimizer={"lr": 1e-2, "clip_grad": 1.0, "weight_decay": 0.1},
        checkpoint={"keep_last": 2},
    )


def _train(policy: Any, cfg: Any, dp_rank: int, steps: range) -> list[float]:
    losses = []
    for step in steps:
        batch, plan = local_part(make_batch(VOCAB, seed=step), cfg, dp_rank)
        reference = policy.reference_log_probs(batch, plan)
        old = policy.log_probs(batch, plan).log_probs + np.float32(0.1)
        batch = batch.with_arrays(reference_log_probs=reference, old_log_probs=old)
        policy.set_learning_rate(1e-2 / (step + 1))
        metrics = policy.train_step(batch, plan, SPEC)
        losses += [metrics[name] for name in COMPARED]
    return losses


def write_all(paths: dict[bool, str], runs: str) -> dict[str, Any]:
    """In a rank: train, save in the middle, go on; and read back in every layout of the same size."""
    from megatron_rl.policy import distributed

    written = {writer: write_checkpoint(paths, Path(runs), writer, parallel) for writer, parallel in WRITERS.items()}
    found: dict[str, Any] = {"written": written}
    for writer, readers in READERS.items():
        for reader, parallel in readers.items():
            if parallel:
                found[f"{writer}->{reader}"] = read_checkpoint(paths, Path(runs), writer, parallel)
    found["damaged"] = _damaged(paths, Path(runs))
    found["full"] = _full(paths, Path(runs))
    distributed.shutdown()
    return found


def read_alone(paths: dict[bool, str], runs: str) -> list[float]:
    """In the only rank: what two ranks wrote."""
    return read_checkpoint(paths, Path(runs), "tp2", {})["losses"]


def write_checkpoint(paths: dict[bool, str], runs: Path, writer: str, parallel: dict[str, Any]) -> dict[str, Any]:
    """Train, save in `runs/writer`, and train on; `paths` of the untied (False) and the tied (True) model."""
    import torch

    from megatron_rl.policy.policy import Policy

    cfg = _config(paths, writer, parallel)
    run_dir = runs / writer
    with layout(cfg) as dp_rank:
        policy = Policy.build(cfg)
        batch, plan = local_part(make_batch(VOCAB, seed=50), cfg, dp_rank)
        policy.sft_step(batch, plan, 1e-2)  # the reference is not what `model.path` holds
        policy.freeze_reference()
        _train(policy, cfg, dp_rank, range(BEFORE))
        random.random(), np.random.rand(), torch.rand(1)  # the generators are no longer as `initialize` left them
        extra = {"progress": {"step": BEFORE}, "controller": b"state"}
        folder = policy.save(run_dir, BEFORE, extra, metric=0.5)
        drawn = (random.random(), float(np.random.rand()), float(torch.rand(1)))
        losses = _train(policy, cfg, dp_rank, range(BEFORE, BEFORE + AFTER))
        policy.save(run_dir, BEFORE + AFTER, extra, metric=0.1)
        return {"folder": str(folder), "losses": losses, "drawn": drawn}


def read_checkpoint(paths: dict[bool, str], runs: Path, writer: str, parallel: dict[str, Any]) -> dict[str, Any]:
    """Go on in the layout `parallel` from what `writer` has saved."""
    import torch

    from megatron_rl.policy.policy import Policy

    cfg = _config(paths, writer, parallel)
    with layout(cfg) as dp_rank:
        policy = Policy.build(cfg)
        extra = policy.load(runs / writer / "checkpoints" / f"step-{BEFORE:06d}")
        drawn = (random.random(), float(np.random.rand()), float(torch.rand(1)))
        losses = _train(policy, cfg, dp_rank, range(BEFORE, BEFORE + AFTER))
        return {"losses": losses, "extra": extra, "drawn": drawn}


def _damaged(paths: dict[bool, str], runs: Path) -> dict[str, str]:
    """What loading says of one changed bit, and of files that are not readable although they are what was written."""
    from megatron_rl.policy.policy import Policy

    cfg = _config(paths, "tp2", TP2)
    with layout(cfg):
        folder = Policy.build(cfg).save(runs / "damaged", 1, {}, metric=None)
        _rewrite(folder / "policy" / "__1_0.distcp", lambda content: bytes([content[0] ^ 1]) + content[1:])
        flipped = _error_of(lambda: Policy.build(cfg).load(folder))
        _rewrite(folder / "policy" / "__1_0.distcp", lambda content: b"\xff" * len(content))
        return {"flipped": flipped, "unreadable": _error_of(lambda: Policy.build(cfg)._load_state(folder))}


def _rewrite(path: Path, change: Callable[[bytes], bytes]) -> None:
    """By one rank, before any other goes on."""
    if dist.get_rank() == 0:
        path.write_bytes(change(path.read_bytes()))
    dist.barrier()


def _error_of(load: Callable[[], object]) -> str:
    try:
        load()
    except checkpoint.CheckpointError as error:
        return str(error)
    return "no error"


def _full(paths: dict[bool, str], runs: Path) -> str:
    """What saving says when files cannot grow beyond what fits: a limit of this process plays the full disk."""
    from megatron_rl.policy.policy import Policy

    cfg = _config(paths, "tp2", TP2)
    with layout(cfg):
        policy = Policy.build(cfg)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
        try:
            return _error_of(lambda: policy.save(runs / "full", 1, {}, metric=None))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def found(tmp_path_factory, runs) -> list[dict[str, Any]]:
    """By rank: what happened in the launch of two ranks, and in the one after it."""
    folder = tmp_path_factory.mktemp("models")
    paths = {tied: str(tiny_model(folder / str(tied), tied=tied, vocab_size=VOCAB, layers=4)) for tied in (False, True)}
    results = run_ranks(2, write_all, paths, str(runs), timeout=240)
    results[0]["tp2->one_rank"] = {"losses": run_ranks(1, read_alone, paths, str(runs), timeout=120)[0]}
    return results


@pytest.mark.parametrize("pair", [f"{writer}->{reader}" for writer in READERS for reader in READERS[writer]])
def test_losses_after_resuming_are_those_of_the_uninterrupted_run(found, pair):
    expected = found[0]["written"][pair.split("->")[0]]["losses"]
    tolerance = 2e-2 if "bf16" in pair else 1e-4
    assert found[0][pair]["losses"] == pytest.approx(expected, rel=tolerance, abs=tolerance / 10)


@pytest.mark.parametrize("pair", ["tp2->tp2", "dp2->dp2", "cp2->cp2", "tp2_whole->tp2", "tp2_bf16->tp2"])
def test_the_same_layout_repeats_the_run_to_the_last_bit(found, pair):
    for rank in found:
        written = rank["written"][pair.split("->")[0]]
        assert rank[pair]["losses"] == written["losses"]
        assert rank[pair]["drawn"] == written["drawn"]


def test_what_the_loop_gave_along_comes_back_on_every_rank(found):
    for rank in found:
        assert rank["tp2->pp2"]["extra"] == {"progress": {"step": BEFORE}, "controller": b"state"}


def test_one_changed_bit_is_found_by_its_reader_and_told_by_every_rank(found):
    for rank in found:
        assert "step-000001/policy/__1_0.distcp has the right size but not the bytes" in rank["damaged"]["flipped"]
        assert "the checkpoint is damaged" in rank["damaged"]["flipped"]


def test_a_checkpoint_that_torch_cannot_read_is_damaged_on_every_rank(found):
    for rank in found:
        assert "step-000001/policy cannot be read" in rank["damaged"]["unreadable"]


def test_a_checkpoint_for_which_there_is_no_room_fails_on_every_rank_and_is_never_found(found, runs):
    for rank in found:
        assert ".tmp-step-000001 cannot be written" in rank["full"]
    assert checkpoint.latest(runs / "full") is None


def test_resuming_removed_the_checkpoints_of_later_steps(found, runs):
    assert [path.name for path in (runs / "tp2" / "checkpoints").iterdir()] == [f"step-{BEFORE:06d}"]
