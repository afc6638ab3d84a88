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


def test_a_fresh_clone_sets_itself_up_once_and_updates_in_place(tmp_path: Path) -> None:
    clone = tmp_path / "a clone with spaces"
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True, timeout=120)

    first = quickstart(clone, "--dry-run", "--steps", "3")
    assert "making a virtual environment" in first
    assert "dry run: nothing was started" in first
    assert not (clone / "runs").exists()
    status = subprocess.run(["git", "status", "--porcelain"], cwd=clone, capture_output=True, text=True, timeout=60)
    assert status.stdout == ""

    assert "[setup]" not in quickstart(clone, "--dry-run")

    with (clone / "constraints-cpu.txt").open("a") as pins:
        pins.write("# changed\n")
    changed = quickstart(clone, "--dry-run")
    assert "[setup] ready" in changed
    assert "making a virtual environment" not in changed
    assert "[setup]" not in quickstart(clone, "--dry-run")
