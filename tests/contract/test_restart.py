"""A supervised engine that dies: a weight update waits for it, and it comes back with the published weights."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from megatron_rl.config import Config, dump
from megatron_rl.rollout.control import EngineControl
from megatron_rl.weights.current import CurrentWeights, announce
from tests.contract.servers import NO_SGLANG, REPOSITORY, SGLANG, START_TIMEOUT_S, Client
from tests.unit.rollout_rig import config

PATIENCE_S = 120.0


@dataclass
class Supervised:
    """One engine of a run, started as a run starts it."""

    process: subprocess.Popen[bytes]
    run_dir: Path
    log: Path

    def endpoint(self) -> dict[str, object]:
        """What the engine has published."""
        path = self.run_dir / "endpoints" / "engine-0.json"
        deadline = time.monotonic() + START_TIMEOUT_S
        while not path.exists():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)
        return dict(json.loads(path.read_text()))

    def kill(self) -> None:
        """The engine, not its supervisor."""
        os.kill(int(str(self.endpoint()["pid"])), signal.SIGKILL)


@pytest.fixture
def supervised(tmp_path: Path, models: tuple[Path, Path]) -> Iterator[Supervised]:
    with started(config(tmp_path / "run", models[0], []), tmp_path) as running:
        yield running


@contextmanager
def started(cfg: Config, tmp_path: Path) -> Iterator[Supervised]:
    """The supervisor of replica 0, ended afterwards."""
    (tmp_path / "config.yaml").write_text(dump(cfg))
    argv = [sys.executable, "-m", "megatron_rl.cli", "serve", "--config", str(tmp_path / "config.yaml")]
    with open(tmp_path / "log", "wb") as log:
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        process = subprocess.Popen(argv, stdout=log, stderr=log, env=environment, cwd=tmp_path)
    try:
        yield Supervised(process, tmp_path / "run", tmp_path / "log")
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(60)


def test_an_engine_comes_back_at_its_address_with_the_published_weights(
    supervised: Supervised, models: tuple[Path, Path]
) -> None:
    url = str(supervised.endpoint()["url"])
    weights = supervised.run_dir / "weights"
    control = EngineControl([url], timeout_s=PATIENCE_S)
    supervised.kill()
    control.wait_ready()
    checksum = control.update_from_disk(models[1], 4).overall
    assert checksum is not None
    announce(weights, CurrentWeights(4, str(models[1]), checksum))
    supervised.kill()
    control.wait_ready()
    assert Client(url).ok("/model_info")["weight_version"] == "4"
    assert Client(url).ok("/weights_checker", {"action": "checksum"})["per_engine_checksum"] == checksum


@pytest.mark.slow
@pytest.mark.skipif(not SGLANG.exists(), reason=NO_SGLANG)
def test_a_real_sglang_whose_scheduler_hangs_is_replaced_as_a_whole(tmp_path: Path, models: tuple[Path, Path]) -> None:
    engine = {"kind": "sglang", "python": str(SGLANG), "context_length": 512, "silent_timeout_s": 20.0}
    cfg = config(tmp_path / "run", models[0], [], engine=engine, deterministic=False)
    with started(cfg, tmp_path) as running:
        first = running.endpoint()
        tree = psutil.Process(int(str(first["pid"]))).children(recursive=True)
        (scheduler,) = [process for process in tree if "scheduler" in " ".join(process.cmdline())]
        scheduler.suspend()
        deadline = time.monotonic() + START_TIMEOUT_S
        while running.endpoint()["pid"] == first["pid"]:
            assert time.monotonic() < deadline, running.log.read_text()[-3000:]
            time.sleep(0.1)
        assert running.endpoint()["url"] == first["url"]
        assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in tree)
        assert Client(str(first["url"])).ok("/model_info")["model_path"] == str(models[0])
    assert "the engine was silent for 20 s (engine.silent_timeout_s); starting it again" in running.log.read_text()
