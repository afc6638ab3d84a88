"""Weight updates from disk: all or nothing, versions per token, checksums that change exactly when the weights do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.contract.conftest import Reference
from tests.contract.servers import Server

PROMPT = [60, 61, 62, 63]


def update(server: Server, model: Path, **fields: Any) -> dict[str, Any]:
    return server.ok("/update_weights_from_disk", {"model_path": str(model), **fields})


def test_update_changes_what_is_generated_and_back(
    server: Server, reference: Reference, other_reference: Reference
) -> None:
    answer = update(server, server.other_model, weight_version="w1")
    assert answer["success"] is True
    assert "w1" in answer["message"]
    assert server.ok("/model_info")["weight_version"] == "w1"
    assert server.ok("/model_info")["model_path"] == str(server.other_model)
    changed = server.generate(PROMPT, max_new_tokens=12, temperature=0, ignore_eos=True)
    assert changed["output_ids"] == other_reference.greedy(PROMPT, 12)
    assert changed["meta_info"]["weight_versions"] == [{"version": "w1", "start": 0, "end": 12}]
    update(server, server.model, weight_version="w0")
    back = server.generate(PROMPT, max_new_tokens=12, temperature=0, ignore_eos=True)
    assert back["output_ids"] == reference.greedy(PROMPT, 12)


def test_checksums_change_exactly_with_the_weights(server: Server, tmp_path: Path) -> None:
    before = server.checksums()
    assert before == server.checksums()
    one_changed = Path(shutil.copytree(server.model, tmp_path / "one"))
    tensors = load_file(one_changed / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name][3, 4] += 1e-3
    save_file(tensors, one_changed / "model.safetensors")
    update(server, one_changed)
    after = server.checksums()
    assert [n for n in before if before[n] != after[n]] == [name]
    update(server, server.model)
    assert server.checksums() == before


def test_overall_checksum_summarises_all(server: Server) -> None:
    first = server.ok("/weights_checker", {"action": "checksum"})
    update(server, server.other_model)
    second = server.ok("/weights_checker", {"action": "checksum"})
    assert first["success"] is second["success"] is True
    assert len(first["per_engine_checksum"]) == 64
    assert first["per_engine_checksum"] != second["per_engine_checksum"]


def update_half_way(server: Server, mode: str) -> dict[str, Any]:
    """The answer to a request that drew at least ten tokens before and ten after an update in a pause of this mode."""
    future = server.generate_later(PROMPT, rid="long.", max_new_tokens=3000, temperature=0, ignore_eos=True)
    load = server.wait_for_load("some tokens", lambda load: load["num_used_tokens"] >= len(PROMPT) + 10)
    server.ok("/pause_generation", {"mode": mode})
    if mode == "retract":
        server.ok("/flush_cache", {})
    else:
        load = server.load()
    update(server, server.other_model, weight_version="w1", flush_cache=mode == "retract")
    server.ok("/continue_generation", {})
    server.wait_for_load("ten more", lambda now: now["num_used_tokens"] > load["num_used_tokens"] + 10)
    server.ok("/abort_request", {"rid": "long."})
    return future.result(60)


def test_update_in_place_gives_each_token_its_version(
    server: Server, reference: Reference, other_reference: Reference
) -> None:
    answer = update_half_way(server, "in_place")
    meta = answer["meta_info"]
    drawn = meta["weight_versions"][0]["end"]
    assert 10 <= drawn < len(answer["output_ids"])
    assert meta["weight_versions"] == [
        {"version": "w0", "start": 0, "end": drawn},
        {"version": "w1", "start": drawn, "end": len(answer["output_ids"])},
    ]
    assert meta["weight_version"] == "w1"
    assert answer["output_ids"][:drawn] == reference.greedy(PROMPT, drawn)
    log_probs = np.array([value for value, _, _ in meta["output_token_logprobs"]])
    new = other_reference.log_probs(PROMPT, answer["output_ids"], 1.0)
    assert np.abs(log_probs[drawn:] - new[drawn:]).max() > 1e-3  # the old keys and values were kept


def test_update_after_retraction_recomputes_with_the_new_weights(server: Server, other_reference: Reference) -> None:
    answer = update_half_way(server, "retract")
    spans = answer["meta_info"]["weight_versions"]
    assert [span["version"] for span in spans] == ["w0", "w1"]
    start = spans[1]["start"]
    log_probs = [value for value, _, _ in answer["meta_info"]["output_token_logprobs"]]
    expected = other_reference.log_probs(PROMPT, answer["output_ids"], 1.0)
    np.testing.assert_allclose(log_probs[start:], expected[start:], rtol=0, atol=1e-5)


def test_update_outside_a_pause_waits_for_what_is_generated(server: Server) -> None:
    future = server.generate_later(PROMPT, max_new_tokens=server.lasting, ignore_eos=True)
    server.wait_for_load("the request to run", lambda load: load["num_running_reqs"] == 1)
    update(server, server.other_model, weight_version="w1")
    answer = future.result(10)
    assert answer["meta_info"]["weight_versions"] == [{"version": "w0", "start": 0, "end": server.lasting}]
    assert server.ok("/model_info")["weight_version"] == "w1"


def test_update_does_not_end_a_pause(server: Server) -> None:
    server.ok("/pause_generation", {"mode": "retract"})
    update(server, server.other_model, weight_version="w1")
    held = server.generate_later(PROMPT, max_new_tokens=1)
    with pytest.raises(TimeoutError):
        held.result(0.2)
    server.ok("/continue_generation", {})
    assert held.result(60)["meta_info"]["weight_version"] == "w1"


def test_update_that_would_flush_under_running_requests_is_refused(server: Server) -> None:
    server.generate_later(PROMPT, max_new_tokens=3000, ignore_eos=True)
    server.wait_for_load("the request to run", lambda load: load["num_running_reqs"] == 1)
    server.ok("/pause_generation", {"mode": "in_place"})
    answer = server.call("/update_weights_from_disk", {"model_path": str(server.other_model), "flush_cache": True})
    assert answer.status == 400
    assert answer.body["success"] is False
    assert "running" in answer.body["message"]


def _missing_folder(folder: Path) -> str:
    shutil.rmtree(folder)
    return "no such directory"


def _no_weights(folder: Path) -> str:
    (folder / "model.safetensors").unlink()
    return "no safetensors files"


def _missing_tensor(folder: Path) -> str:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.self_attn.k_norm.weight"]
    save_file(tensors, folder / "model.safetensors")
    return "k_norm"


def _surplus_tensor(folder: Path) -> str:
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "model.layers.2.input_layernorm.weight": torch.ones(64)}, folder / "model.safetensors")
    return "model.layers.2"


def _wrong_shape(folder: Path) -> str:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(65)
    save_file(tensors, folder / "model.safetensors")
    return "model.norm.weight has shape (65,)"


def _another_vocabulary(folder: Path) -> str:
    tensors = load_file(folder / "model.safetensors")
    rows, width = tensors["model.embed_tokens.weight"].shape
    tensors["model.embed_tokens.weight"] = torch.ones(rows + 1, width)
    save_file(tensors, folder / "model.safetensors")
    return f"model.embed_tokens.weight has shape ({rows + 1}, {width}), served is ({rows}, {width})"


def _truncated(folder: Path) -> str:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])
    return "cannot be read"


def _index_names_a_missing_file(folder: Path) -> str:
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return "model-00001-of-00002.safetensors"


@pytest.mark.parametrize(
    "damage",
    [
        _missing_folder,
        _no_weights,
        _missing_tensor,
        _surplus_tensor,
        _wrong_shape,
        _another_vocabulary,
        _truncated,
        _index_names_a_missing_file,
    ],
)
def test_failed_update_keeps_the_old_weights(embedded_server: Server, tmp_path: Path, damage: Any) -> None:
    """A real SGLang loads what it finds of a missing tensor's model, and ends at one of a wrong shape."""
    server = embedded_server
    folder = Path(shutil.copytree(server.other_model, tmp_path / "damaged"))
    reason = damage(folder)
    before = server.checksums()
    message = refuse(server, folder)
    assert reason in message
    assert server.checksums() == before


@pytest.mark.parametrize("damage", [_missing_folder, _no_weights])
def test_weights_that_are_not_there_are_refused_and_the_next_ones_taken(
    server: Server, tmp_path: Path, damage: Any
) -> None:
    folder = Path(shutil.copytree(server.other_model, tmp_path / "damaged"))
    damage(folder)
    before = server.checksums()
    assert refuse(server, folder)
    update(server, server.model, weight_version="w0")
    assert server.checksums() == before


def refuse(server: Server, folder: Path) -> str:
    """The message with which an update from `folder` is refused."""
    answer = server.call("/update_weights_from_disk", {"model_path": str(folder), "weight_version": "w1"})
    assert answer.status == 400
    assert answer.body["success"] is False
    assert server.ok("/model_info")["weight_version"] == "w0"
    return str(answer.body["message"])
