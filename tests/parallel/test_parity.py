"""`preflight --parity` on real servers: it agrees where nothing is wrong, and names what is wrong otherwise."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from megatron_rl.parity_report import Evidence, causes, table
from tests.parallel.launch import run_ranks
from tests.tiny import tiny_model
from tests.unit.rollout_rig import config

pytestmark = [pytest.mark.parallel, pytest.mark.slow]
Change = Callable[[dict[str, Any]], None]


@contextmanager
def engine(folder: Path, model: Path, dtype: str) -> Iterator[str]:
    """The URL of an embedded engine."""
    endpoint = folder / f"{dtype}.json"
    words = ["--model", str(model), "--endpoint-file", str(endpoint), "--dtype", dtype, "--seed", "1"]
    with open(folder / f"{dtype}.log", "wb") as log:
        process = subprocess.Popen([sys.executable, "-m", "megatron_rl.engines.serve", *words], stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 120
        while not endpoint.exists():
            assert process.poll() is None, (folder / f"{dtype}.log").read_text()
            assert time.monotonic() < deadline, "the engine did not start"
            time.sleep(0.05)
        yield json.loads(endpoint.read_text())["url"]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


@contextmanager
def between(url: str, change: Change, offset: float = 0.0) -> Iterator[str]:
    """The URL of a server that passes everything on to the engine at `url`, requests to generate after `change`.

    `offset` is added to all log-probs that come back.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._pass_on(None)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path == "/generate":
                value = json.loads(body)
                if value.get("logprob_start_len") != 0:  # not what is only scored
                    change(value)
                body = json.dumps(value).encode()
            self._pass_on(body)

        def _pass_on(self, body: bytes | None) -> None:
            request = urllib.request.Request(url + self.path, body, {"Content-Type": "application/json"})
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as answer:
                content = answer.read()
            if self.path == "/generate" and offset:
                content = json.dumps([shifted(one, offset) for one in json.loads(content)]).encode()
            self.send_response(answer.status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def shifted(answer: dict[str, Any], offset: float) -> dict[str, Any]:
    """As from an engine whose softmax counts more entries than there are."""
    for name in ("output_token_logprobs", "input_token_logprobs"):
        for entry in answer["meta_info"].get(name) or ():
            if entry[0] is not None:
                entry[0] += offset
    return answer


def sampling(**values: Any) -> Change:
    """Ask for other sampling than the client."""

    def change(body: dict[str, Any]) -> None:
        for params in body["sampling_params"]:
            params.update(values)

    return change


def cut(body: dict[str, Any]) -> None:
    """Lose the first token of every prompt."""
    body["input_ids"] = [ids[1:] for ids in body["input_ids"]]


def examined(folder: str, model: str, other: str, urls: dict[str, str]) -> dict[str, str]:
    """In each of two data-parallel ranks: what was found out, as JSON."""
    import torch.distributed as dist

    from megatron_rl.cluster.rank_zero import RankZero
    from megatron_rl.parity import Engine, Trainer, examine
    from megatron_rl.policy import distributed
    from megatron_rl.policy.policy import Policy
    from megatron_rl.rollout.control import EngineControl

    from .policy_setup import DP2, layout

    found = {}
    cfg = config(
        Path(folder) / str(dist.is_initialized()),
        Path(model),
        ["http://unused:1"],
        parallel=DP2,
        deterministic=False,
        rollout={"temperature": 0.8, "max_response_tokens": 48, "group_size": 4},
    )
    with layout(cfg):
        zero = RankZero(dist.distributed_c10d._get_default_store(), dist.get_rank())
        policy = Policy.build(cfg)
        for case, url in urls.items():
            control = EngineControl([url], timeout_s=60)
            asked = Engine(cfg, control, policy.hf.vocab_size, policy.hf.hidden_size)
            if case == "weights":
                zero.run(case, lambda: control.update_from_disk(Path(other), 7).version, 60)  # noqa: B023
            sampled = zero.run(case, lambda: asked.sample(24), 60)  # noqa: B023
            evidence = examine(cfg, Trainer(cfg, policy, sampled), asked, sampled, zero, reload_engine=True)
            file = Path(folder) / f"{case}-{dist.get_rank()}.json"
            evidence.write(file)
            found[case] = file.read_text()
            control.close()
    distributed.shutdown()
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Evidence]:
    """By case."""
    folder = tmp_path_factory.mktemp("parity")
    model = tiny_model(folder / "model")
    shutil.copytree(model, folder / "other")
    tensors = load_file(folder / "other" / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"] * np.float32(1.05)
    save_file(tensors, folder / "other" / "model.safetensors", metadata={"format": "pt"})
    with ExitStack() as stack:
        right = stack.enter_context(engine(folder, model, "float32"))
        urls = {"agrees": right, "dtype": stack.enter_context(engine(folder, model, "bfloat16"))}
        changes = {"temperature": sampling(temperature=0.5), "top-p": sampling(top_p=0.7), "tokens": cut}
        urls |= {name: stack.enter_context(between(right, change)) for name, change in changes.items()}
        urls["vocabulary"] = stack.enter_context(between(right, sampling(), offset=-0.25))
        urls |= {"weights": right, "agrees again": right}
        ranks = run_ranks(2, examined, str(folder), str(model), str(folder / "other"), urls)
    assert ranks[0] == ranks[1]
    for case, text in ranks[0].items():
        (folder / case).write_text(text)
    return {case: Evidence.read(folder / case) for case in ranks[0]}


@pytest.mark.parametrize("case", ["agrees", "agrees again"])
def test_where_nothing_is_wrong_they_agree(found: dict[str, Evidence], case: str) -> None:
    evidence = found[case]
    assert list(causes(evidence)) == []
    assert evidence.prompts == 24
    assert evidence.gap.tokens > 500
    assert evidence.gap.max_abs < 1e-5
    assert evidence.gap.ess > 1 - 1e-6
    assert abs(evidence.likelier or 0.0) < 4


def test_an_engine_that_samples_at_another_temperature_is_told_by_the_one_that_fits(found: dict[str, Evidence]) -> None:
    (cause,) = causes(found["temperature"])
    assert cause.name == "temperature"
    assert "fit temperature 0.5" in cause.says
    assert "not rollout.temperature=0.8" in cause.says


def test_filtered_sampling_is_told_by_tokens_that_are_too_likely(found: dict[str, Evidence]) -> None:
    """The log-probs are those of the whole distribution, so they agree."""
    assert found["top-p"].gap.max_abs < 1e-5
    (cause,) = causes(found["top-p"])
    assert cause.name == "top-p"
    assert "top_p, top_k, min_p" in cause.says


def test_tokens_that_are_lost_on_the_way_are_told_by_their_number(found: dict[str, Evidence]) -> None:
    cause = next(causes(found["tokens"]))
    assert cause.name == "tokens"
    assert "arrived as one of" in cause.says


def test_other_weights_are_told_by_reading_them_again(found: dict[str, Evidence]) -> None:
    (cause,) = causes(found["weights"])
    assert cause.name == "weights"
    assert "1 parameters changed" in cause.says
    assert "layers.1.mlp.up_proj" in cause.says


def test_a_softmax_over_other_entries_is_told_by_the_same_difference_everywhere(found: dict[str, Evidence]) -> None:
    (cause,) = causes(found["vocabulary"])
    assert cause.name == "vocabulary"
    assert "nearly the same +0.25" in cause.says


def test_another_number_format_is_told_by_rounding_the_trainers_weights(found: dict[str, Evidence]) -> None:
    evidence = found["dtype"]
    (cause,) = causes(evidence)
    assert cause.name == "dtype"
    assert "bfloat16, the trainer in float32" in cause.says
    assert evidence.changed == []
    assert evidence.rounded is not None
    assert evidence.scored is not None
    assert evidence.rounded.mean_abs < evidence.scored.mean_abs
    assert ("trainer, engine", "float32, bfloat16") in table(evidence)
