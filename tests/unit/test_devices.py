"""Which GPU goes to whom in a local run, and how a part of the devices is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_rl.cluster.devices import ask_driver, engine_devices, visible_devices
from megatron_rl.config import Config, ConfigError
from megatron_rl.engines.sglang import sglang_from_config
from megatron_rl.engines.sglang_command import command_line
from megatron_rl.engines.sglang_install import Installed
from tests.unit.rollout_rig import config

UUIDS = [f"GPU-{letter}" for letter in "abcdefgh"]


def run(tmp_path: Path, **sections: Any) -> Config:
    """Four trainer ranks and two replicas of two devices each, of SGLang."""
    engine = {"kind": "sglang", "replicas": 2, "tp": 2, **sections.pop("engine", {})}
    parallel = {"tensor_model_parallel_size": 2, "data_parallel_size": 2}
    return config(tmp_path, Path("/model"), [], engine=engine, parallel=parallel, deterministic=False, **sections)


def test_colocated_engines_share_the_devices_of_the_ranks_in_order(tmp_path: Path) -> None:
    cfg = run(tmp_path, cluster={"placement": "colocated"})
    assert engine_devices(cfg, UUIDS[:4]) == [["GPU-a", "GPU-b"], ["GPU-c", "GPU-d"]]


def test_others_get_devices_behind_those_of_the_trainer(tmp_path: Path) -> None:
    assert engine_devices(run(tmp_path), UUIDS) == [["GPU-e", "GPU-f"], ["GPU-g", "GPU-h"]]
    on_cpus = run(tmp_path, cluster={"device": "cpu"})
    assert engine_devices(on_cpus, UUIDS) == [["GPU-a", "GPU-b"], ["GPU-c", "GPU-d"]]


def test_too_few_devices_are_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"want 4 GPUs behind the 4 of the trainer, and this machine shows 6: .*colo"):
        engine_devices(run(tmp_path), UUIDS[:6])


def test_without_devices_or_with_engines_that_use_none_nothing_is_given(tmp_path: Path) -> None:
    assert engine_devices(run(tmp_path), []) == [[], []]
    embedded = config(tmp_path, Path("/model"), [], engine={"replicas": 2})
    assert engine_devices(embedded, UUIDS[:1]) == [[], []]


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, UUIDS),
        ("", []),
        ("3, 1", ["GPU-d", "GPU-b"]),
        ("GPU-c,0", ["GPU-c", "GPU-a"]),
        ("1,8,2", ["GPU-b"]),
        ("-1", []),
        ("GPU-", []),
    ],
)
def test_visible_devices_are_read_as_cuda_reads_them(visible: str | None, expected: list[str]) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert visible_devices(environ, lambda: UUIDS) == expected


def test_the_drivers_answer_is_one_uuid_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert ask_driver() == []
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho GPU-1\necho GPU-2\n")
    tool.chmod(0o755)
    assert ask_driver() == ["GPU-1", "GPU-2"]


def test_only_engines_on_shared_gpus_are_made_to_give_up_memory(tmp_path: Path) -> None:
    installed = Installed("0.5.23", "2.14.1")

    def words(cfg: Config, installed: Installed = installed) -> list[str]:
        options = sglang_from_config(cfg, 0, "127.0.0.1", 30000)
        return command_line(options, 30000, installed, None, None)

    shared = run(tmp_path, cluster={"placement": "colocated"})
    assert "--enable-memory-saver" in words(shared)
    assert "--enable-memory-saver" not in words(run(tmp_path))
    cpu = run(tmp_path, cluster={"placement": "colocated"}, engine={"tp": 1})
    assert "--enable-memory-saver" not in words(cpu, Installed("0.5.23", "2.13.0+cpu"))
