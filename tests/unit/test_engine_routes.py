"""Which experts every token was routed to, as the embedded engine keeps and reports it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_rl.engines.embedded.decoder import Decoder
from megatron_rl.engines.embedded.fixed_shapes import FixedShapeDecoder
from megatron_rl.engines.embedded.forward import ForwardPass
from megatron_rl.engines.embedded.kv_cache import KVShape
from megatron_rl.engines.embedded.request import Request
from megatron_rl.engines.embedded.weights import Weights, load_model
from tests.tiny import tiny_model
from tests.unit.test_engine_scheduler import VOCAB, Rig, request

DENSE = 1
"""The layer of the tiny models that has no experts."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("routes")
    return tiny_model(folder, "qwen3_moe", vocab_size=VOCAB, layers=3, mlp_only_layers=[DENSE])


@pytest.fixture(scope="module")
def model(path: Path) -> Any:
    return load_model(str(path), "float32")


@pytest.fixture(scope="module", params=[True, False], ids=["fixed shapes", "any shapes"])
def rig(request: pytest.FixtureRequest, path: Path) -> Iterator[Rig]:
    made = Rig(path, fixed=request.param, routes=True)
    yield made
    made.scheduler.stop()
    assert made.scheduler.join(60)


def routes_of(model: Any, tokens: Any) -> np.ndarray:
    """Experts of transformers' own forward, [tokens, 3, 2], heaviest first; 0 in the dense layer."""
    with torch.inference_mode():
        logits = model(torch.as_tensor(tokens)[None], output_router_logits=True).router_logits
    found = np.zeros((len(tokens), 3, 2), np.int64)
    for layer, values in zip((0, 2), logits, strict=True):
        found[:, layer] = values.topk(2, -1).indices.numpy()
    return found


def asking(rid: str, prompt: list[int], tokens: int, start: int, seed: int = 0) -> Request:
    made = request(rid, prompt, tokens, seed)
    made.routed_from = start
    return made


def routed(request: Request) -> np.ndarray:
    assert request.routed_experts is not None
    assert request.routed_experts.dtype == np.int32
    return request.routed_experts


def test_every_token_but_the_last_is_reported_with_the_experts_of_the_full_forward(rig: Rig, model: Any) -> None:
    requests = [
        asking(f"r{i}", list(range(4, 5 + i % 6)), 3 + i, start=i % 3 if i > 2 else 0, seed=i) for i in range(9)
    ]
    rig.run(requests)
    for one in requests:
        assert one.routed_from is not None
        np.testing.assert_array_equal(routed(one), routes_of(model, one.tokens[:-1])[one.routed_from :])


def test_segments_report_only_what_is_new_whether_or_not_the_cache_was_kept(rig: Rig, model: Any) -> None:
    for flush in (False, True):
        tokens, rows = [5, 6, 7, 8], list[np.ndarray]()
        for segment in range(4):
            part = asking(f"s{segment}", tokens, 5, start=sum(map(len, rows)), seed=segment)
            rig.run([part])
            rows.append(routed(part))
            tokens = part.tokens.tolist()
            if segment == 1:
                tokens += [9, 10, 11]  # what an environment said is reported by the one who reads it first
            assert not flush or rig.call(rig.scheduler.flush)
        np.testing.assert_array_equal(np.concatenate(rows), routes_of(model, tokens[:-1]))
        assert [len(r) for r in rows] == [8, 5, 8, 5]


def test_a_start_beyond_the_last_token_that_was_read_reports_none(rig: Rig) -> None:
    one = asking("r", [5, 6, 7], 1, start=3)
    rig.run([one])
    assert routed(one).shape == (0, 3, 2)


def test_nothing_is_reported_to_who_does_not_ask_nor_kept_where_nobody_may(rig: Rig, path: Path) -> None:
    silent = request("r", [5, 6, 7], 4)
    rig.run([silent])
    assert silent.routed_experts is None
    other = Rig(path)
    try:
        asked = asking("r", [5, 6, 7], 4, 0)
        other.run([asked])
    finally:
        other.scheduler.stop()
    assert asked.routed_experts is None
    assert other.decoder.cache.routes == []


def test_a_retracted_and_an_aborted_response_report_what_was_computed_last(rig: Rig, model: Any) -> None:
    long = asking("long", [5, 6, 7], 200, 0)
    rig.scheduler.submit([long])
    rig.call(lambda: rig.scheduler.pause("retract"))
    rig.call(rig.scheduler.resume)
    while rig.call(lambda: rig.scheduler.load().cached_tokens) < 10:
        pass
    rig._left = 1
    rig._done.clear()
    rig.call(lambda: rig.scheduler.abort(lambda _: True))
    assert rig._done.wait(60)
    np.testing.assert_array_equal(routed(long), routes_of(model, long.tokens[:-1]))


def test_fixed_shapes_give_a_token_the_same_bits_and_experts_in_any_company(model: Any) -> None:
    decoder = FixedShapeDecoder(ForwardPass(model), 20, 64, 2**30, routes=True)
    prompts = [np.random.default_rng(i).integers(0, VOCAB, 1 + 2 * i) for i in range(20)]

    def run(rows: list[int]) -> tuple[torch.Tensor, np.ndarray]:
        decoder.flush()
        chosen = [prompts[i] for i in rows]
        logits = [decoder.prefill(chosen, [[i] for i in range(len(rows))], 0)]
        lengths = np.array([len(p) for p in chosen])
        for step in range(5):
            logits.append(decoder.decode(np.full(len(rows), 5 + step), lengths + step))
        slot = rows.index(7)
        routes = decoder.routes(slot, 0, len(prompts[7]) + 5)
        assert routes is not None
        return torch.stack([row[slot] for row in logits]), routes

    with torch.inference_mode():
        alone, experts = run([7])
        for rows in ([3, 7], [7, 11, 0], list(range(20)), list(range(19, -1, -1))):
            bits, same = run(rows)
            assert torch.equal(bits, alone)
            np.testing.assert_array_equal(same, experts)


def test_routes_move_grow_and_return_with_keys_and_values(model: Any) -> None:
    decoder = Decoder(ForwardPass(model), 8, 300, 2**30, routes=True)
    prompts = [np.arange(3 + i) % VOCAB for i in range(4)]
    with torch.inference_mode():
        decoder.prefill(prompts[:2], [[0], [1, 2]], 0)
        saved = decoder.cache.save(1, 4)
        decoder.prefill([np.arange(200) % VOCAB], [[3]], 3)
        decoder.move(np.array([0]), np.array([2]), 4)
        decoder.restore([saved], 4)
    for slot in (0, 1, 4):
        np.testing.assert_array_equal(decoder.routes(slot, 1, 4), routes_of(model, prompts[1])[1:])
    assert saved.length == 4
    assert saved.nbytes > saved.keys_values.nbytes


def test_the_budget_counts_what_is_kept() -> None:
    with_routes, without = KVShape(3, 2, 16, torch.float32, 8, 64, 2, 2), KVShape(3, 2, 16, torch.float32, 8, 64)
    assert with_routes.bytes_for(8, 64) - without.bytes_for(8, 64) == 8 * 64 * 2 * 2 * 2


def test_bfloat16_experts_stay_near_the_full_forward(path: Path) -> None:
    model = load_model(str(path), "bfloat16")
    tokens = np.arange(20) % VOCAB
    with torch.inference_mode():
        expected = model(torch.from_numpy(tokens)[None]).logits[0, -1]
        for kind in (Decoder, FixedShapeDecoder):
            logits = kind(ForwardPass(model), 4, 64, 2**30).prefill([tokens], [[0]], 0)[0]
            assert (logits - expected).abs().max() < 0.05 * expected.abs().max()


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3", "glm4_moe"])
def test_the_names_of_weights_are_those_of_the_checkpoint(tmp_path: Path, family: Any) -> None:
    from safetensors import safe_open

    folder = tiny_model(tmp_path, family, vocab_size=VOCAB)
    with safe_open(folder / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert set(Weights(load_model(str(folder), "float32")).checksums()) == names
    assert any(".experts.7." in name for name in names)
