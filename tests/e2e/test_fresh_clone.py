"""The promise of the first page: a fresh clone sets itself up with one command, once, and says what it does."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(1800)]


def quickstart(clone: Path, *arguments: str) -> str:
    """Run the script from another folder; returns all that it printed."""
    done = subprocess.run(
        [clone / "launch" / "quickstart.sh", *arguments],
        cwd=clone.parent,
        env={name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def begun_run(clone: Path, tmp_path: Path, seed: int) -> Path:
    """A run directory as it is once a run with this seed has begun."""
    run = tmp_path / "a run"
    maker = [
        clone / ".venv/bin/python",
        clone / "tools/make_quickstart.py",
        "--out",
        run / "inputs",
        "--seed",
        str(seed),
    ]
    subprocess.run(maker, check=True, timeout=120)
    show = [
        clone / ".venv/bin/megatron-rl",
        "config",
        clone / "configs/quickstart.yaml",
        f"run_dir={run}",
        f"seed={seed}",
    ]
    resolved = subprocess.run(show, check=True, capture_output=True, text=True, timeout=120)
    (run / "config.yaml").write_text(resolved.stdout)
    return run


def test_a_fresh_clone_sets_itself_up_once_and_updates_in_place(tmp_path: Path) -> None:
    clone = tmp_path / "a clone with spaces"
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True, timeout=120)

    first = quickstart(clone, "--dry-run", "--steps", "3")
    assert "making a virtual environment" in first
    assert "dry run: nothing was started" in first
    assert not (clone / "runs").exists()
    status = subprocess.run(["git", "status", "--porcelain"], cwd=clone, capture_output=True, text=True, timeout=60)
    assert status.stdout == ""

    assert "[setup]" not in quickstart(clone, "--dry-run", "--out", str(tmp_path / "planned"))
    assert not (tmp_path / "planned").exists()
    assert "\nseed: 7\n" in quickstart(clone, "--resume", "--dry-run", "--out", str(begun_run(clone, tmp_path, 7)))

    with (clone / "constraints-cpu.txt").open("a") as pins:
        pins.write("# changed\n")
    changed = quickstart(clone, "--dry-run")
    assert "[setup] ready" in changed
    assert "making a virtual environment" not in changed
    assert "[setup]" not in quickstart(clone, "--dry-run")
