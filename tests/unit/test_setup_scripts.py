"""What the set-up of the two commands says and returns when it cannot go on; nothing is installed here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ["launch", "setup.py", "constraints-cpu.txt", "megatron_rl/__init__.py", "tests/run.sh"]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The files that the set-up reads, in a folder with a space in its name."""
    copy = tmp_path / "a checkout"
    for name in NEEDED:
        target = copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target)
        else:
            shutil.copy2(ROOT / name, target)
    return copy


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)
    return path


def run(checkout: Path, *arguments: str, script: str = "launch/quickstart.sh", **environment: str) -> tuple[int, str]:
    """Run a script from another folder; returns its exit code and all that it printed."""
    done = subprocess.run(
        [checkout / script, *arguments],
        cwd=checkout.parent,
        env={**os.environ, "MEGATRON_RL_PYTHON": sys.executable, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize("script", ["launch/quickstart.sh", "launch/install_sglang.sh", "tests/run.sh"])
def test_help_needs_no_set_up(checkout: Path, script: str) -> None:
    code, text = run(checkout, "--help", script=script)
    assert code == 0
    assert text.startswith("Usage: ")
    assert not (checkout / ".venv").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "many"], "--steps takes a whole number, not 'many'"),
        (["--seed"], "--seed needs a value"),
        (["--faster"], "unknown option --faster"),
        (["30"], "an override has the form section.key=value"),
        (["--resume"], "--resume needs --out DIR"),
        (["--resume", "--out", "nothing"], "nothing holds no run"),
    ],
)
def test_a_wrong_argument_is_refused_before_any_set_up(checkout: Path, arguments: list[str], message: str) -> None:
    code, text = run(checkout, *arguments)
    assert code == 64
    assert message in text
    assert not (checkout / ".venv").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--gpu"], 64, "unknown option --gpu"),
        (["--venv"], 64, "--venv needs a directory"),
        (["--cpu", "--venv", "{mine}"], 17, "{mine} exists and was not made by this script"),
    ],
)
def test_sglang_is_not_installed_into_anything_else(
    checkout: Path, arguments: list[str], code: int, message: str
) -> None:
    mine = checkout / "mine"
    mine.mkdir()
    done = run(checkout, *(word.format(mine=mine) for word in arguments), script="launch/install_sglang.sh")
    assert done[0] == code
    assert message.format(mine=mine) in done[1]
    assert not list(mine.iterdir())


def test_an_earlier_run_is_refused_before_its_inputs_are_made_again(checkout: Path) -> None:
    earlier = checkout.parent / "an earlier run"
    earlier.mkdir()
    (earlier / "metrics.jsonl").touch()
    code, text = run(checkout, "--out", str(earlier), "--seed", "7")
    assert code == 64
    assert f"--out {earlier} holds an earlier run; add --resume" in text
    assert [path.name for path in earlier.iterdir()] == ["metrics.jsonl"]


def test_a_python_of_another_version_is_named_and_refused(checkout: Path, tmp_path: Path) -> None:
    other = program(tmp_path / "bin" / "python", "echo 3.9")
    code, text = run(checkout, MEGATRON_RL_PYTHON=str(other))
    assert code == 10
    assert f"MEGATRON_RL_PYTHON={other} is not a working 64-bit CPython 3.11" in text


def test_without_any_python_the_ways_to_install_one_are_listed(checkout: Path, tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("bash", "env", "dirname", "cat", "sed", "cksum", "uname"):
        (tools / name).symlink_to(shutil.which(name) or name)
    for name in ("python3.11", "python3", "python"):
        program(tools / name, "exit 127")
    search = {"PATH": str(tools), "HOME": str(tmp_path), "PYENV_ROOT": str(tmp_path), "MEGATRON_RL_PYTHON": ""}
    code, text = run(checkout, **search)
    assert code == 10
    assert "uv python install 3.11" in text


def test_a_missing_venv_module_is_named_with_its_package(checkout: Path, tmp_path: Path) -> None:
    bare = program(
        tmp_path / "bin" / "python", f'case "$*" in *ensurepip*) exit 1 ;; esac\nexec "{sys.executable}" "$@"'
    )
    code, text = run(checkout, MEGATRON_RL_PYTHON=str(bare))
    assert code == 11
    assert "apt-get install python3.11-venv" in text


def test_a_full_disk_is_told_before_anything_is_written(checkout: Path, tmp_path: Path) -> None:
    program(
        tmp_path / "bin" / "df",
        "printf 'Filesystem Blocks Used Available Capacity Mounted\\n/dev/x 9 9 204800 99%% /\\n'",
    )
    code, text = run(checkout, PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    assert code == 12
    assert "has 200 MB free; the set-up needs about 3000 MB" in text
    assert not (checkout / ".venv").exists()


def test_an_environment_of_someone_else_is_left_alone(checkout: Path) -> None:
    (checkout / ".venv").mkdir()
    (checkout / ".venv" / "mine").touch()
    code, text = run(checkout, script="tests/run.sh")
    assert code == 17
    assert "was not made by this script" in text
    assert [path.name for path in (checkout / ".venv").iterdir()] == ["mine"]


@pytest.mark.parametrize(
    ("programs", "words"),
    [
        ({"apt-get": "echo E: no such package; exit 100"}, ["apt-get install", "slurm-wlm", "E: no such package"]),
        ({"id": "echo 1000", "sudo": "exit 1"}, ["needs root, or sudo without a password", "As root: apt-get install"]),
    ],
    ids=["apt-get fails", "neither root nor sudo"],
)
def test_system_packages_that_cannot_be_installed_are_told_with_the_command(
    checkout: Path, tmp_path: Path, programs: dict[str, str], words: list[str]
) -> None:
    for name, text in {"dpkg-query": "exit 1", **programs}.items():
        program(tmp_path / "bin" / name, text)
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    code, text = run(checkout, "--install-system", script="tests/run.sh", PATH=path)
    assert code == 18
    assert [word for word in words if word not in text] == []
    assert not (checkout / ".venv").exists()
