"""Controller, client and trainer's side together with a real engine: one server, started once for this file."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from megatron_rl.rollout.client import EngineClient, Job
from megatron_rl.rollout.control import EngineControl
from megatron_rl.rollout.endpoint import controller_file
from megatron_rl.rollout.flights import Run
from megatron_rl.rollout.pull import ControllerClient, ControllerError
from megatron_rl.rollout.sample import Sample
from megatron_rl.rollout.wire import RolloutShard, RolloutTable
from tests.tiny import tiny_model
from tests.unit.rollout_rig import (
    config,
    deterministic_engine,
    log_probs_of,
    running_controller,
    saved_groups,
    start_process,
    write_prompts,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "m", vocab_size=64, layers=1, max_position_embeddings=64)


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a deterministic engine."""
    with deterministic_engine(tmp_path_factory.mktemp("engine"), model) as url:
        yield url


def publish(engine: str, model: Path, client: ControllerClient, version: int) -> None:
    EngineControl([engine], timeout_s=60).update_from_disk(model, version)
    client.set_weights_version(version)


def table_of(client: ControllerClient, step: int) -> RolloutTable:
    return RolloutTable.from_bytes(client.table(step))


def sampled(
    engine: str, model: Path, client: ControllerClient, first: int, last: int
) -> list[tuple[RolloutTable, RolloutShard]]:
    """Play the trainer for some steps; the weights stay as they are, under new versions."""
    found = []
    for step in range(first, last):
        publish(engine, model, client, step)
        client.wait_ready(step, timeout_s=120)
        table = table_of(client, step)
        found.append((table, RolloutShard.from_bytes(client.samples(step, [*range(len(table))]))))
        client.done(step)
    return found


def same(a: tuple[RolloutTable, RolloutShard], b: tuple[RolloutTable, RolloutShard]) -> bool:
    return a[0].sample_ids == b[0].sample_ids and all(
        np.array_equal(getattr(a[1], name), getattr(b[1], name))
        for name in ("tokens", "offsets", "behaviour_log_probs")
    )


@pytest.fixture(scope="module")
def whole_run(engine: str, model: Path, tmp_path_factory: pytest.TempPathFactory):
    """Three uninterrupted steps: (configuration, what was sampled in each)."""
    cfg = config(tmp_path_factory.mktemp("whole"), model, [engine])
    with running_controller(cfg), ControllerClient(cfg.run_dir) as client:
        return cfg, sampled(engine, model, client, 0, 3)


def test_a_step_brings_exactly_the_wanted_informative_groups_with_tokens_masks_and_log_probs(whole_run):
    cfg, steps = whole_run
    for step, (table, shard) in enumerate(steps):
        assert len(table) == cfg.rollout.groups_per_step * cfg.rollout.group_size
        assert table.informative.all()
        assert table.valid.all()
        assert table.sample_ids == sorted(table.sample_ids) == shard.sample_ids
        assert set(table.version_first) == set(table.version_last) == {step}
        assert np.array_equal(np.diff(shard.offsets), table.prompt_length + table.response_length)
        assert np.array_equal(np.add.reduceat(shard.mask, shard.offsets[:-1]), table.trainable_tokens)
        assert np.array_equal(table.trainable_tokens, table.response_length)
        assert (shard.behaviour_log_probs[shard.mask] < 0).all()
        assert not shard.behaviour_log_probs[~shard.mask].any()
        assert ((shard.tokens >= 0) & (shard.tokens < 64)).all()
        assert table.truncated.tolist() == (table.response_length == cfg.rollout.max_response_tokens).tolist()
        for group in range(cfg.rollout.groups_per_step):
            assert len(set(table.correctness[table.group_index == group])) == 2


def test_no_prompt_is_drawn_twice_before_all_were_drawn(whole_run):
    _, steps = whole_run
    groups = [name[:10] for table, _ in steps for name in table.sample_ids[::4]]
    assert len(groups) == len(set(groups))


def test_the_same_seed_samples_the_same_tokens_again_and_another_seed_others(whole_run, engine, model, tmp_path):
    _, first = whole_run
    cfg = config(tmp_path / "again", model, [engine])
    with running_controller(cfg), ControllerClient(cfg.run_dir) as client:
        again = sampled(engine, model, client, 0, 2)
    other_cfg = config(tmp_path / "other", model, [engine], seed=4)
    with running_controller(other_cfg), ControllerClient(other_cfg.run_dir) as client:
        other = sampled(engine, model, client, 0, 1)
    assert same(first[0], again[0])
    assert same(first[1], again[1])
    assert not same(first[0], other[0])


def test_a_controller_that_is_restored_goes_on_as_if_nothing_had_happened(whole_run, engine, model, tmp_path):
    _, whole = whole_run
    cfg = config(tmp_path, model, [engine])
    with running_controller(cfg), ControllerClient(cfg.run_dir) as client:
        sampled(engine, model, client, 0, 2)
        state, ledger = client.get_state(), client.ledger()
        publish(engine, model, client, 2)
        client.wait_ready(2, timeout_s=120)  # sampled, but the run dies before it is trained on
        client.done(2)
    later = tmp_path / "rollouts" / "step-000003.parquet"
    assert later.exists()
    with running_controller(cfg), ControllerClient(cfg.run_dir) as client:
        client.put_state(state)
        assert not later.exists()
        with pytest.raises(ControllerError, match="only into one that has just started"):
            client.put_state(state)
        assert client.step_status(1).status == "stopped"
        restored = client.ledger()
        assert {n: restored[n] for n in ("drawn", "trained", "filtered")} == {
            n: ledger[n] for n in ("drawn", "trained", "filtered")
        }
        assert ledger["trained"] == 8
        assert ledger["drawn"] == sum(ledger[n] for n in ("trained", "filtered", "waiting", "in_flight", "finished"))
        resumed = sampled(engine, model, client, 2, 3)
    assert same(whole[2], resumed[0])
    assert whole[2][0].metrics == resumed[0][0].metrics


def test_the_dump_of_a_step_holds_every_sample_looked_at_and_says_which_were_trained_on(whole_run):
    cfg, steps = whole_run
    seen = set()
    for step, (table, shard) in enumerate(steps):
        rows = pq.read_table(Path(cfg.run_dir) / "rollouts" / f"step-{step + 1:06d}.parquet").to_pylist()
        trained = [r for r in rows if r["trained"]]
        assert [r["sample_id"] for r in trained] == table.sample_ids
        assert [r["reward"] for r in trained] == table.reward.tolist()
        assert {r["step"] for r in rows} == {step + 1}
        assert all(
            len({o["correctness"] for o in rows if o["group_id"] == r["group_id"]}) == 1
            for r in rows
            if not r["trained"]
        )
        assert {r["weight_version_first"] for r in rows} == {step}
        first = trained[0]
        assert first["prompt"].startswith("<|im_start|>user\n")
        assert json.loads(first["components"]) == {cfg.reward.components[0].name: first["correctness"]}
        assert first["source"] in ("s0", "s1")
        log_probs = shard.behaviour_log_probs[: shard.offsets[1]][shard.mask[: shard.offsets[1]]]
        assert first["log_prob_mean"] == pytest.approx(float(log_probs.mean()))
        assert not seen & {r["group_id"] for r in rows}
        seen |= {r["group_id"] for r in rows}
    assert seen == set(range(len(seen)))  # in deterministic mode prompts are used up in order


def test_an_evaluation_asks_the_same_questions_every_time(engine, model, tmp_path):
    held_out = write_prompts(tmp_path / "held-out.jsonl", 6, "e")
    cfg = config(
        tmp_path, model, [engine], data={"eval_prompts": str(held_out)}, eval={"samples_per_prompt": 4, "ks": [1, 2, 4]}
    )
    with running_controller(cfg), ControllerClient(cfg.run_dir) as client:
        found = client.evaluate(step=0, prompts=5, samples_per_prompt=4)
        again = client.evaluate(step=10, prompts=5, samples_per_prompt=4, label="again")
        every = client.evaluate(step=11, prompts=99)
    assert found == again
    assert 0 <= found["eval/pass_at_1_low"] <= found["eval/pass_at_1"] <= found["eval/pass_at_1_high"] <= 1
    assert found["eval/pass_at_1"] <= found["eval/pass_at_2"] <= found["eval/pass_at_4"]
    assert (found["eval/prompts"], found["eval/samples"]) == (5, 20)
    assert (every["eval/prompts"], every["eval/samples"]) == (6, 6)
    rows = pq.read_table(tmp_path / "eval" / "step-000000.parquet").to_pylist()
    assert len(rows) == 20
    assert np.mean([r["correctness"] for r in rows]) == pytest.approx(found["eval/pass_at_1"])
    assert (tmp_path / "eval" / "step-000010-again.parquet").exists()


@pytest.mark.parametrize("mode", ["off", "mask"])
def test_without_refill_uninformative_groups_stay_in_the_batch_and_mask_takes_them_out_of_the_loss(
    mode, engine, model, tmp_path
):
    cfg = config(tmp_path, model, [engine], rollout={"dynamic_sampling": mode, "group_size": 2, "groups_per_step": 12})
    with running_controller(cfg), ControllerClient(cfg.run_dir) as client:
        table, shard = sampled(engine, model, client, 0, 1)[0]
    assert table.sample_ids == [f"s{g:09d}-{k:03d}." for g in range(12) for k in range(2)]
    varied = np.repeat([len(set(table.correctness[table.group_index == g])) == 2 for g in range(12)], 2)
    assert table.informative.tolist() == varied.tolist()
    assert 0 < varied.sum() < 24, "this seed should show both kinds"
    expected = table.response_length * (varied | (mode == "off"))
    assert table.trainable_tokens.tolist() == expected.tolist()
    assert shard.mask.sum() == expected.sum()


def test_overlong_responses_are_punished_filtered_and_shuffling_permutes_rewards_within_groups(engine, model, tmp_path):
    rollout = {"dynamic_sampling": "off", "overlong_cache": 4, "overlong_scale": 0.5}
    plain = config(tmp_path / "plain", model, [engine], rollout=rollout)
    other = config(
        tmp_path / "shuffled", model, [engine], rollout={**rollout, "overlong_filter": True}, reward={"shuffle": True}
    )
    tables = []
    for cfg in (plain, other):
        with running_controller(cfg), ControllerClient(cfg.run_dir) as client:
            tables.append(sampled(engine, model, client, 0, 1)[0][0])
    table, shuffled = tables
    penalty = np.clip((table.response_length - 4) / 4, 0, 1) * -0.5
    np.testing.assert_allclose(table.reward, table.correctness + penalty)
    assert shuffled.sample_ids == table.sample_ids
    pairs = [list(zip(t.reward.tolist(), t.correctness.tolist(), strict=True)) for t in tables]
    assert pairs[0] != pairs[1]
    for group in range(4):
        members = slice(4 * group, 4 * group + 4)
        assert sorted(pairs[0][members]) == sorted(pairs[1][members])
    assert table.truncated.any()
    assert (shuffled.trainable_tokens == np.where(table.truncated, 0, table.response_length)).all()


def test_groups_that_were_aborted_are_sampled_anew_and_none_is_trained_on_twice(engine, model, tmp_path):
    cfg = config(tmp_path, model, [engine], deterministic=False, rollout={"oversample": 3.0, "groups_per_step": 2})
    with running_controller(cfg), ControllerClient(cfg.run_dir) as client:
        steps = sampled(engine, model, client, 0, 4)
        ledger = client.ledger()
    assert [len(table) for table, _ in steps] == [8] * 4
    assert all(table.informative.all() for table, _ in steps)
    assert all(set(table.version_first) == {step} for step, (table, _) in enumerate(steps))
    names = [name for table, _ in steps for name in table.sample_ids]
    assert len(names) == len(set(names))
    assert ledger["trained"] == 8
    assert ledger["drawn"] < 4 * 6, "no prompt that was given back was used again"


def test_tokens_of_older_weights_fail_the_step_and_name_the_engine(engine, model, tmp_path):
    EngineControl([engine], timeout_s=60).update_from_disk(model, 0)
    cfg = config(tmp_path, model, [engine], rollout={"request_timeout_s": 1})
    with running_controller(cfg), ControllerClient(cfg.run_dir) as client:
        client.set_weights_version(0)
        client.wait_ready(0, timeout_s=120)
        client.done(0)
        client.set_weights_version(1)  # the engine was not told
        with pytest.raises(ControllerError) as caught:
            client.wait_ready(1, timeout_s=120)
        assert client.step_status(1).needs_weights == [engine]
    assert engine in str(caught.value)
    assert "holds weight version '0', but 1 is published" in str(caught.value)


def test_an_engine_that_was_not_updated_is_named_and_serves_again_when_it_was(engine, model, tmp_path):
    EngineControl([engine], timeout_s=60).update_from_disk(model, 0)
    with running_controller(config(tmp_path, model, [engine])) as _, ControllerClient(tmp_path) as client:
        client.set_weights_version(0)
        client.wait_ready(0, timeout_s=120)
        client.done(0)
        client.set_weights_version(1, serving=[], start=False)
        assert client.step_status(1).status == "waiting"  # who holds the weights is one thing, the start another
        client.set_weights_version(1)
        status = client.wait_ready(1, timeout_s=120, enough=lambda status: bool(status.needs_weights))
        assert (status.status, status.needs_weights) == ("generating", [engine])
        EngineControl([engine], timeout_s=60).update_from_disk(model, 1)
        client.set_weights_version(1, serving=[engine], start=False)
        assert client.wait_ready(1, timeout_s=120).needs_weights == []
        assert set(table_of(client, 1).version_first) == {1}


@pytest.mark.parametrize(
    "rollout", [{"mode": "async"}, {"partial_rollouts": True, "oversample": 2.0}], ids=["async", "partial"]
)
def test_every_token_has_the_log_prob_of_the_weights_that_it_says_sampled_it(engine, tmp_path, monkeypatch, rollout):
    """Weights that have nothing to do with each other, published while responses are generated in short segments.

    Half of the groups stop after their first segments until the first update is over.
    """
    updated, segment = threading.Event(), EngineClient._segment

    async def held(client: EngineClient, run: Run, jobs: list[Job]) -> list[Job]:
        begun = jobs[0].sample.response_length > 0 and int(jobs[0].sample.id[1:10]) % 2
        while begun and not (updated.is_set() or run.suspended):
            await asyncio.sleep(0.01)
        return await segment(client, run, jobs)

    monkeypatch.setattr(EngineClient, "_segment", held)
    steps = 3
    shape = {"vocab_size": 64, "layers": 1, "max_position_embeddings": 64}
    models = [tiny_model(tmp_path / f"v{version}", seed=version, **shape) for version in range(steps + 1)]
    rollout = {"max_response_tokens": 32, "max_prompt_tokens": 24, "segment_tokens": 8, **rollout}
    rollout |= {"dynamic_sampling": "off", "max_staleness": steps}
    cfg = config(tmp_path / "run", models[0], [engine], deterministic=False, steps=steps, rollout=rollout)
    seen: dict[str, Sample] = {}

    def look_until(found: Callable[[Sample], bool]) -> None:
        deadline = time.monotonic() + 120
        while True:
            groups, _ = saved_groups(client)
            seen.update({sample.id: sample for group in groups for sample in group.samples})
            if any(map(found, seen.values())):
                return
            assert time.monotonic() < deadline, "no response is as it was waited for"

    with running_controller(cfg), ControllerClient(cfg.run_dir) as client:
        publish(engine, models[0], client, 0)
        for step in range(steps):
            client.wait_ready(step, timeout_s=120)
            if step == 0:
                look_until(lambda sample: not sample.finished and sample.response_length > 0)
            client.wait_update(step + 1, timeout_s=120)
            EngineControl([engine], timeout_s=60).update_from_disk(models[step + 1], step + 1)
            updated.set()
            client.done(step)
            if step + 1 < steps:
                client.set_weights_version(step + 1)
                look_until(lambda sample: len(sample.spans) > 1)
    mixed = [sample for sample in seen.values() if len(sample.spans) > 1]
    for sample in [*mixed[:8], *list(seen.values())[:8]]:
        for version, start, end in sample.spans:
            expected = log_probs_of(models[version], sample)[start:end]
            np.testing.assert_allclose(sample.log_probs[start:end], expected, atol=1e-4)


def test_a_resumed_controller_goes_on_with_the_tokens_that_were_saved(engine, model, tmp_path):
    """Killed with a batch complete and others half-way: what was suspended is continued, not generated again."""
    rollout = {"max_response_tokens": 32, "max_prompt_tokens": 24, "segment_tokens": 4, "dynamic_sampling": "off"}
    rollout |= {"partial_rollouts": True, "oversample": 4.0}
    cfg = config(tmp_path, model, [engine], deterministic=False, steps=3, rollout=rollout)
    with running_controller(cfg), ControllerClient(cfg.run_dir) as client:
        publish(engine, model, client, 0)
        client.wait_ready(0, timeout_s=120)
        client.wait_update(1, timeout_s=120)
        state = client.get_state()
        groups, partial = saved_groups(client)
        chosen = table_of(client, 0).sample_ids
    before = {s.id: s for group in groups if group.id in partial for s in group.samples}
    assert any(sample.response_length for sample in before.values())
    after: dict[str, Sample] = {}
    with running_controller(cfg), ControllerClient(cfg.run_dir) as client:
        client.put_state(state)
        for step in range(3):
            publish(engine, model, client, step)
            client.wait_ready(step, timeout_s=120)
            if step == 0:
                assert table_of(client, 0).sample_ids == chosen
            after |= {s.id: s for group in saved_groups(client)[0] for s in group.samples}
            client.wait_update(step + 1, timeout_s=120)
            client.done(step)
        ledger = client.ledger()
    assert ledger["drawn"] == sum(ledger[name] for name in ("trained", "filtered", "waiting", "in_flight", "finished"))
    assert before.keys() <= after.keys()
    for name, sample in before.items():
        kept = sample.response_length
        assert after[name].response_tokens[:kept].tolist() == sample.response_tokens.tolist()
        assert after[name].log_probs[:kept].tolist() == sample.log_probs.tolist()


def test_the_process_serves_until_it_is_asked_to_end_and_removes_its_address(engine, model, tmp_path):
    cfg = config(tmp_path, model, [engine])
    process = start_process(cfg)
    try:
        with ControllerClient(tmp_path, timeout_s=60) as client:
            assert client.step_status(0).status == "waiting"
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    finally:
        process.kill()
    assert not controller_file(tmp_path).exists()
