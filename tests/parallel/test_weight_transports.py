"""Weights from four trainer ranks to two engines, by every transport and layout; and what fails on the way."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.rollout.control import EngineControl
from tests.contract.servers import (
    NO_SGLANG,
    SGLANG,
    Client,
    Server,
    launch_embedded,
    launch_sglang,
    wait_until_ready,
)
from tests.parallel.launch import RankError, run_ranks
from tests.parallel.policy_setup import layout, make_config
from tests.tiny import tiny_model

pytestmark = pytest.mark.parallel

TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
EP2 = {"data_parallel_size": 2, "expert_model_parallel_size": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2-ep2": TP2 | EP2,
    "pp2-ep2": {"pipeline_model_parallel_size": 2} | EP2,
    "tp2-pp2": TP2 | {"pipeline_model_parallel_size": 2},
}
MODEL: dict[str, Any] = {"layers": 4, "vocab_size": 300, "max_position_embeddings": 256, "mlp_only_layers": [1]}
"""With experts, and one layer without."""
KINDS = ("broadcast", "ipc", "disk")
BUCKET_BYTES = 40_000
"""Several buckets of a tiny model."""
DEADLINE_S = 60.0


# ------------------------------------------------------------------------------------------------------- on the ranks


def open_publisher(
    path: Path,
    run_dir: Path,
    urls: list[str],
    parallel: dict[str, Any],
    kind: str,
    policy: Any = None,
    api_key: str | None = None,
) -> Any:
    """A publisher over this policy, or a new one; small buckets."""
    import torch.distributed as dist

    import megatron_rl.publisher as publisher
    from megatron_rl.cluster.rank_zero import RankZero
    from megatron_rl.policy.policy import Policy

    cfg = make_config(path, parallel, engine={"urls": urls, "weight_transport": kind, "bucket_mib": 1})
    cfg = cfg.model_copy(update={"run_dir": str(run_dir)})
    publisher.MIB = BUCKET_BYTES  # type: ignore[attr-defined]
    store = dist.PrefixStore(str(run_dir), dist.distributed_c10d._get_default_store())  # a run's own, as it were
    zero = RankZero(store, dist.get_rank())
    engines = EngineControl(urls, timeout_s=DEADLINE_S, api_key=api_key)
    return publisher.Publisher(cfg, policy or Policy.build(cfg), zero, engines, lambda: False, lambda: False)


def change(policy: Any, factor: float) -> None:
    """Other weights, on all ranks the same ones."""
    import torch

    with torch.no_grad():
        for chunk in policy.chunks:
            for parameter in chunk.parameters():
                parameter.mul_(factor)


def checksums(urls: list[str], api_key: str | None = None) -> list[dict[str, str]]:
    return [Client(url, api_key).checksums() for url in urls]


def publish_in_all_layouts(path: Path, folder: Path, urls: list[str], api_key: str | None = None) -> dict[str, Any]:
    """Who holds the weights, and checksums: of version 0, of version 1, and when the disk has brought that again."""
    from megatron_rl.policy import distributed
    from megatron_rl.policy.policy import Policy
    from megatron_rl.weights.load import load_hf_weights

    found: dict[str, Any] = {}
    for name, parallel in LAYOUTS.items():
        cfg = make_config(path, parallel)
        with layout(cfg):
            policy = Policy.build(cfg)
            for kind in KINDS:
                load_hf_weights(policy.chunks, policy.hf, path)
                publisher = open_publisher(path, folder / f"{name}-{kind}", urls, parallel, kind, policy, api_key)
                look = functools.partial(publisher._zero.run, "checksums", lambda: checksums(urls, api_key), DEADLINE_S)
                held, sums = [publisher.publish(0)], [look()]
                change(policy, 1.02)
                held.append(publisher.publish(1))
                sums.append(look())
                held.append(publisher.repair(urls))
                sums.append(look())
                versions = sorted(path.name for path in (folder / f"{name}-{kind}/weights").glob("v*"))
                found[f"{name}-{kind}"] = {"held": held, "sums": sums, "versions": versions}
                publisher._engines.close()
    distributed.shutdown()
    return found


@dataclass
class Failure:
    """What an update with a fault has come to."""

    held: list[str] = field(default_factory=list)
    dirty: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    repaired: list[str] = field(default_factory=list)
    good: bool = False
    """Whether all engines in `held` and `repaired` have the bytes that they should have."""


@contextmanager
def at_bucket(number: int, fault: Callable[[], None]) -> Iterator[None]:
    """Do something when a process group begins to send its bucket of this number."""
    from megatron_rl.weights.transports.group import UpdateGroup

    original, count = UpdateGroup.start, {"left": number}

    def start(self: Any, bucket: Any, flat: Any) -> None:
        original(self, bucket, flat)
        count["left"] -= 1
        if count["left"] == 0:
            fault()

    UpdateGroup.start = start  # type: ignore[method-assign]
    try:
        yield
    finally:
        UpdateGroup.start = original  # type: ignore[method-assign]


def fail_in_turn(path: Path, other: Path, folder: Path, urls: list[str], pid: int) -> dict[str, Failure | str]:
    """One rank, two engines in groups of their own; the second one has the faults, and is killed at last."""
    import megatron_rl.rollout.weight_update as weight_update
    from megatron_rl.policy import distributed

    def close_session() -> None:
        assert Client(urls[1]).call("/end_weight_update", {}).status == 200

    def signal_engine(number: int) -> Callable[[], None]:
        return lambda: os.kill(pid, number)

    found: dict[str, Failure | str] = {}
    weight_update.CONTROL_TIMEOUT_S = 5.0
    with layout(make_config(path)):
        found["refused"] = refused(other, folder, urls)
        publisher = open_publisher(path, folder / "run", urls, {}, "broadcast")
        publisher.publish(0)
        settle(publisher, replicas_per_group=1)
        found["session"] = faulty(publisher, 1, urls, close_session)
        settle(publisher, bucket_timeout_s=1.0)
        found["stopped"] = faulty(publisher, 2, urls, signal_engine(signal.SIGSTOP), signal_engine(signal.SIGCONT))
        settle(publisher, bucket_timeout_s=DEADLINE_S, replicas_per_group=2)
        found["together"] = faulty(publisher, 3, urls, close_session)
        settle(publisher, replicas_per_group=1)
        found["dirty"] = twice(publisher, 4, urls, close_session)
        found["killed"] = faulty(publisher, 6, urls, signal_engine(signal.SIGKILL))
        publisher._engines.close()
    distributed.shutdown()
    return found


def settle(publisher: Any, **changes: Any) -> None:
    """Other settings from the next update on."""
    publisher._transport._settings = dataclasses.replace(publisher._transport._settings, **changes)


def refused(other: Path, folder: Path, urls: list[str]) -> str:
    """The message of weights of another size."""
    from megatron_rl.rollout.protocol import EngineError

    publisher = open_publisher(other, folder / "refused", urls, {}, "broadcast")
    (folder / "refused" / "weights").mkdir(parents=True)
    current = {"version": 0, "path": str(other), "checksum": None}
    (folder / "refused" / "weights" / "current.json").write_text(json.dumps(current))
    try:
        publisher.publish(1)
    except EngineError as error:
        return str(error)
    finally:
        publisher._engines.close()
    return ""


def faulty(
    publisher: Any, version: int, urls: list[str], fault: Callable[[], None], end: Callable[[], None] | None = None
) -> Failure:
    """Publish with a fault, then repair whoever is dirty and alive."""
    result = Failure()
    change(publisher._policy, 1.01)
    began = time.monotonic()
    with at_bucket(3, fault):
        result.held = publisher.publish(version)
    result.seconds = time.monotonic() - began
    result.dirty = {url: str(error) for url, error in publisher.dirty.items()}
    if end:
        end()
    right = Client(urls[0]).checksums()
    result.repaired = publisher.repair(list(result.dirty))
    result.good = all(Client(url).checksums() == right for url in {*result.held, *result.repaired})
    return result


def twice(publisher: Any, version: int, urls: list[str], fault: Callable[[], None]) -> Failure:
    """Publish with a fault, once more without one, then repair; `good`: all have the checksum that is told."""
    with at_bucket(3, fault):
        publisher.publish(version)
    change(publisher._policy, 1.01)
    result = Failure(publisher.publish(version + 1), {url: str(error) for url, error in publisher.dirty.items()})
    result.repaired = publisher.repair(list(result.dirty))
    found = [Client(url).ok("/weights_checker", {"action": "checksum"})["per_engine_checksum"] for url in urls]
    result.good = found == [publisher.checksum] * len(urls)
    return result


def die_in_mid_update(path: Path, folder: Path, urls: list[str]) -> None:
    """The trainer is killed after it has sent some buckets."""
    cfg = make_config(path)
    with layout(cfg):
        publisher = open_publisher(path, folder, urls, {}, "broadcast")
        publisher.publish(0)
        change(publisher._policy, 1.01)
        with at_bucket(3, lambda: os.kill(os.getpid(), signal.SIGKILL)):
            publisher.publish(1)


# ---------------------------------------------------------------------------------------------------------- fixtures


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "m", "qwen3_moe", **MODEL)


@pytest.fixture(scope="module")
def engines(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    """Two, started together."""
    folder = tmp_path_factory.mktemp("engines")
    started = [launch_embedded(folder / str(i), model, model, 4) for i in range(2)]
    try:
        yield [wait_until_ready(server) for server in started]
    finally:
        for server in started:
            server.stop()


@pytest.fixture(scope="module")
def urls(engines: list[Server]) -> list[str]:
    return [server.url for server in engines]


@pytest.fixture(scope="module")
def published(model: Path, urls: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    original = checksums(urls)
    results = run_ranks(4, publish_in_all_layouts, model, tmp_path_factory.mktemp("runs"), urls, timeout=240)
    return [{"original": original, **result} for result in results]


# ---------------------------------------------------------------------------------------------------------- the tests


def check(results: list[dict[str, Any]], case: str, urls: list[str]) -> None:
    """Every engine held the weights each time, and they were those of the export."""
    for result in results:
        found = result[case]
        assert found["held"] == [urls, urls, urls]
        before, after, from_disk = found["sums"]
        assert before == result["original"]  # what was loaded and published unchanged
        assert all(after[0][tensor] != before[0][tensor] for tensor in before[0])
        assert after == from_disk


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_transport_brings_the_bytes_that_the_export_has(
    name: str, kind: str, published: list[dict[str, Any]], urls: list[str]
) -> None:
    check(published, f"{name}-{kind}", urls)


@pytest.mark.slow
@pytest.mark.skipif(not SGLANG.exists(), reason=NO_SGLANG)
def test_every_transport_brings_experts_to_sglang(tmp_path: Path) -> None:
    # SGLang's model of this family has experts in every layer, whatever config.json says.
    model = tiny_model(tmp_path / "m", "qwen3_moe", **MODEL | {"mlp_only_layers": []})
    server = launch_sglang(tmp_path, model, model, 4, MODEL["max_position_embeddings"])
    try:
        wait_until_ready(server)
        words = ([server.url], server.api_key)
        original = checksums(*words)
        results = run_ranks(4, publish_in_all_layouts, model, tmp_path, *words, timeout=500)
    finally:
        server.stop()
    for case in (f"{name}-{kind}" for name in LAYOUTS for kind in KINDS):
        check([{"original": original, **result} for result in results], case, [server.url])


def test_directories_are_written_when_they_are_needed_only(published: list[dict[str, Any]]) -> None:
    for kind in KINDS:
        # version 0 is the base for engines that start, version 1 what the repair has read
        assert published[0][f"tp2-pp2-{kind}"]["versions"] == ["v000000", "v000001"]


def test_a_killed_trainer_leaves_engines_that_answer_at_once_and_can_be_reloaded(
    model: Path, engines: list[Server], urls: list[str], published: Any, tmp_path: Path
) -> None:
    with pytest.raises(RankError, match=r"exit codes \[-9\]"):
        run_ranks(1, die_in_mid_update, model, tmp_path, urls, timeout=120)
    control = EngineControl(urls, timeout_s=DEADLINE_S)
    assert control.update_from_disk(model, 5).left == urls
    control.close()
    assert checksums(urls) == published[0]["original"]


@pytest.fixture(scope="module")
def failures(
    model: Path, engines: list[Server], published: Any, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("faults")
    other = tiny_model(folder / "other", "qwen3_moe", **MODEL, moe_intermediate_size=48)
    process = engines[1].process
    assert process is not None
    words = (model, other, folder, [server.url for server in engines], process.pid)
    return run_ranks(1, fail_in_turn, *words, timeout=240)[0]


def test_weights_of_another_shape_are_refused_with_what_the_engine_says(
    failures: dict[str, Any], urls: list[str]
) -> None:
    assert "no engine holds the weights of version 1" in failures["refused"]
    assert "shape" in failures["refused"]
    assert all(url in failures["refused"] for url in urls)


@pytest.mark.parametrize("fault", ["session", "stopped", "killed"])
def test_an_engine_that_fails_in_mid_update_is_dirty_and_the_other_goes_on(
    fault: str, failures: dict[str, Any], urls: list[str]
) -> None:
    found = failures[fault]
    assert found.held == urls[:1]
    assert found.dirty.keys() == {urls[1]}
    assert found.good
    assert found.seconds < DEADLINE_S


@pytest.mark.parametrize("fault", ["session", "stopped"])
def test_an_engine_that_lives_is_repaired_by_a_full_reload(
    fault: str, failures: dict[str, Any], urls: list[str]
) -> None:
    assert failures[fault].repaired == urls[1:]


def test_a_dirty_engine_gets_no_weights_until_it_is_reloaded_as_a_whole(
    failures: dict[str, Any], urls: list[str]
) -> None:
    found = failures["dirty"]
    assert found.held == urls[:1]
    assert found.dirty.keys() == {urls[1]}
    assert found.repaired == urls[1:]
    assert found.good


def test_a_killed_engine_is_not_repaired(failures: dict[str, Any]) -> None:
    assert failures["killed"].repaired == []


def test_engines_of_one_group_share_its_fate_and_are_reloaded_at_once_when_none_is_left(
    failures: dict[str, Any], urls: list[str]
) -> None:
    found = failures["together"]
    assert sorted(found.held) == sorted(urls)
    assert found.good
    assert found.dirty == {}
