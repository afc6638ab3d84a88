"""A supervised engine that dies: a weight update waits for it, and it comes back with the published weights."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_rl.config import dump
from megatron_rl.rollout.control import EngineControl
from megatron_rl.weights.current import CurrentWeights, announce
from tests.contract.servers import REPOSITORY, Client
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
        deadline = time.monotonic() + PATIENCE_S
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
    cfg = config(tmp_path / "run", models[0], [])
    (tmp_path / "config.yaml").write_text(dump(cfg))
    argv = [sys.executable, "-m", "megatron_rl.cli", "serve", "--config", str(tmp_path / "config.yaml")]
    with open(tmp_path / "log", "wb") as log:
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        process = subprocess.Popen(argv, stdout=log, stderr=log, env=environment, cwd=tmp_path)
    yield Supervised(process, tmp_path / "run", tmp_path / "log")
    if process.poll() is None:
        process.terminate()
    process.wait(60)


def test_an_engine_comes_back_at_its_address_with_the_published_weights(
    supervised: Supervised, models: tuple[Path, Path]
) -> None:
    url = str(supervised.endpoint()["url"])
    weights = supervised.run_dir / "weights"
    control = EngineControl([url], timeout_s=PATIENCE_S, patience_s=PATIENCE_S)
    supervised.kill()
    checksum = control.update_from_disk(models[1], 4)  # waits until it listens again
    assert checksum is not None
    announce(weights, CurrentWeights(4, str(models[1]), checksum))
    supervised.kill()
    control.wait_ready()
    assert Client(url).ok("/model_info")["weight_version"] == "4"
    assert Client(url).ok("/weights_checker", {"action": "checksum"})["per_engine_checksum"] == checksum
