"""Servers for the contract tests and a blocking client; a server of another kind is added here, not in the tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.addresses import free_port
from megatron_rl.cluster.run_dir import RunDir
from megatron_rl.config import dump
from megatron_rl.config.engine import KEY_FILE
from megatron_rl.engines.embedded.options import SPARE_TOKENS
from megatron_rl.engines.sglang_install import find_python
from megatron_rl.rollout.session import error_text
from megatron_rl.weights.transports.group import in_thread
from tests.unit.rollout_rig import config

REPOSITORY = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 300.0
CALL_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 120.0
SGLANG = Path(os.environ.get("MEGATRON_RL_SGLANG_PYTHON") or find_python(None))
"""The interpreter of the environment with a real SGLang, which these tests use when it is there."""
NO_SGLANG = "needs SGLang: launch/install_sglang.sh installs it"


@dataclass(frozen=True)
class Answer:
    """Status and parsed body (None when empty, text when it is not JSON)."""

    status: int
    body: Any

    @property
    def message(self) -> str:
        """The message of an error body, as our client reads it."""
        return error_text(json.dumps(self.body).encode())


@dataclass
class Client:
    """HTTP calls to one server."""

    url: str
    api_key: str | None = None
    timeout_s: float = CALL_TIMEOUT_S
    updated: bool = False
    """Whether it was told to load weights."""

    @property
    def headers(self) -> dict[str, str]:
        """What every request brings along."""
        key = {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}
        return {"Content-Type": "application/json", **key}

    def call(self, path: str, body: Any = None, method: str | None = None) -> Answer:
        """POST with a body, GET without one."""
        self.updated = self.updated or path == "/update_weights_from_disk"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, self.headers, method=method)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=self.timeout_s) as response:
                return Answer(response.status, _parse(response.read()))
        except urllib.error.HTTPError as error:
            return Answer(error.code, _parse(error.read()))

    def ok(self, path: str, body: Any = None) -> Any:
        """The body of a call that must succeed."""
        answer = self.call(path, body)
        assert answer.status == 200, f"{path}: {answer.status} {answer.body}"
        return answer.body

    def generate(self, input_ids: Any, **params: Any) -> Any:
        """POST /generate with log-probs. Keywords are sampling parameters, except rid and logprob_start_len."""
        return self.ok("/generate", generate_body(input_ids, **params))

    def generate_later(self, input_ids: Any, **params: Any) -> Future[Any]:
        """The same from a thread of its own."""
        return in_thread(lambda: self.generate(input_ids, **params))

    def load(self) -> dict[str, Any]:
        """What runs and waits."""
        return self.ok("/v1/loads?include=core")["loads"][0]

    def wait_for_load(self, what: str, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Poll /v1/loads until the condition holds."""
        deadline = time.monotonic() + CALL_TIMEOUT_S
        while time.monotonic() < deadline:
            load = self.load()
            if condition(load):
                return load
            time.sleep(0.01)
        raise AssertionError(f"waited {CALL_TIMEOUT_S:g} s for {what}; the load is {load}")

    def checksums(self) -> dict[str, str]:
        """Parameter name -> hex."""
        return self.ok("/weights_checker", {"action": "checksum"})["ranks"][0]["checksums"]


SEED = 11


def generate_body(input_ids: Any, **params: Any) -> dict[str, Any]:
    """The body of /generate for `Client.generate`. Draws are the same in every run, unless `sampling_seed` is None."""
    outer = {name: params.pop(name) for name in ("rid", "logprob_start_len") if name in params}
    sampling = params.pop("sampling_params", {"sampling_seed": SEED, **params})
    return {"input_ids": input_ids, "sampling_params": sampling, "return_logprob": True, **outer}


def _parse(raw: bytes) -> Any:
    try:
        return json.loads(raw) if raw else None
    except json.JSONDecodeError:
        return raw.decode()


@dataclass
class Server(Client):
    """A running server and what the tests may expect of it."""

    model: Path = Path()
    other_model: Path = Path()
    """Same architecture, other weights."""
    process: subprocess.Popen[bytes] | None = None
    endpoint_file: Path = Path()
    log: Path = Path()
    max_running_requests: int = 0
    kind: str = "embedded"
    lasting: int = 300
    """Tokens that take a good part of a second."""
    seeded: bool = True
    """Whether sampling_seed decides the tokens (real SGLang on a CPU ignores it)."""

    def stop(self) -> int:
        """TERM, wait, exit code."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise


def launch_embedded(
    folder: Path, model: Path, other_model: Path, max_running_requests: int, *options: str, api_key: str | None = None
) -> Server:
    """Start an embedded engine; `wait_until_ready` before use."""
    folder.mkdir(parents=True, exist_ok=True)
    argv = [sys.executable, "-m", "megatron_rl.engines.serve", "--model", str(model), "--weight-version", "w0"]
    argv += ["--endpoint-file", str(folder / "endpoint.json"), "--num-threads", "1"]
    argv += ["--max-running-requests", str(max_running_requests), *options]
    if api_key is not None:
        argv += ["--api-key", api_key]
    server = Server(
        url="",
        api_key=api_key,
        model=model,
        other_model=other_model,
        endpoint_file=folder / "endpoint.json",
        max_running_requests=max_running_requests,
    )
    return _start(server, argv, folder)


def launch_sglang(
    folder: Path, model: Path, other_model: Path, max_running_requests: int, context: int, **settings: Any
) -> Server:
    """Start a real SGLang as a run with these `settings` of section `engine` starts it, with a key of its own.

    `wait_until_ready` before use.
    """
    engine = {
        "kind": "sglang",
        "python": str(SGLANG),
        "max_running_requests": max_running_requests,
        "context_length": context - SPARE_TOKENS,
        "ready_timeout_s": START_TIMEOUT_S,
        # Its load is told anew after every step, not after 15: the tests wait for numbers of tokens.
        "extra_args": [
            *("--weight-version", "w0", "--max-total-tokens", str(4 * context)),
            *("--load-snapshot-publish-interval", "1"),
        ],
        **settings,
    }
    run = RunDir(folder / "run")
    run.prepare(resume=False)
    run.write_config(dump(config(run.path, model, [], engine=engine, deterministic=False)))
    port = free_port()
    argv = [sys.executable, "-m", "megatron_rl.cli", "serve", "--config", str(run.config), "--unsupervised"]
    server = Server(
        url="",
        api_key=(run.path / KEY_FILE).read_text(),
        model=model,
        other_model=other_model,
        endpoint_file=run.engine_endpoint(0),
        max_running_requests=max_running_requests,
        kind="sglang",
        lasting=100,
        seeded=False,
    )
    return _start(server, [*argv, "--port", str(port)], folder)


def _start(server: Server, argv: list[str], folder: Path) -> Server:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    server.log = folder / "log.txt"
    with open(server.log, "wb") as handle:
        server.process = subprocess.Popen(argv, env=environment, stdout=handle, stderr=handle, cwd=folder)
    return server


def wait_until_ready(server: Server) -> Server:
    """Wait for the published address; fails with the end of the log when the process ends first."""
    assert server.process is not None
    deadline = time.monotonic() + START_TIMEOUT_S
    while not server.endpoint_file.exists():
        if server.process.poll() is not None or time.monotonic() > deadline:
            raise AssertionError(f"the server did not come up:\n{server.log.read_text()[-2000:]}")
        time.sleep(0.05)
    server.url = json.loads(server.endpoint_file.read_text())["url"]
    return server
