"""The repository as a whole: what imports cost, what is declared, how long files are, that links and scripts hold."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import megatron_rl

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "megatron_rl"

NOT_OURS = {"runs", "build", "dist", "__pycache__", "node_modules"}
LONG_FILES: dict[str, str] = {}
"""Files over 400 lines and the reason why they stay whole."""
LONG_FUNCTIONS: dict[str, str] = {}
"""Functions over 60 lines (`path::name`) and the reason why they stay whole."""

PROVIDED_BY = {
    "yaml": "pyyaml",
    "math_verify": "math-verify",
    "megatron": "megatron-core",
    "simdjson": "pysimdjson",
    "huggingface_hub": "huggingface-hub",
}
"""Modules whose distribution has another name."""
NOT_FROM_PYPI = {"transformer_engine", "apex"}
"""Optional modules that come with the NGC image; PyPI's `apex` is an unrelated project."""
COMPARED_WITH = {"liger_kernel"}
"""What a benchmark measures beside ours where it happens to be installed."""


def files(*suffixes: str) -> Iterator[Path]:
    """Files of the working tree with one of the suffixes; caches, environments and what runs left are not ours."""
    return (path for path in _working_tree() if path.suffix in suffixes)


@cache
def _working_tree() -> list[Path]:
    found = []
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [name for name in folders if not _is_left_by_a_tool(name)]
        found += [Path(folder) / name for name in names]
    return sorted(found)


def _is_left_by_a_tool(folder: str) -> bool:
    return folder in NOT_OURS or folder.endswith(".egg-info") or (folder[0] == "." and folder != ".ci")


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"), filename=str(path))


def imported_modules(path: Path) -> Iterator[str]:
    """Dotted names of everything a file imports, `from a.b import c` counted as a.b.c too."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def modules(where: str) -> list[str]:
    """Dotted names of the modules in a file or folder of the repository."""
    inside = [path for path in files(".py") if path == ROOT / where or ROOT / where in path.parents]
    return [relative(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in inside]


def import_in_a_fresh_process(names: list[str]) -> set[str]:
    """Import modules in a new interpreter; returns the names of all that is loaded then."""
    code = f"import importlib, sys\nfor name in {names}: importlib.import_module(name)\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split("\n")[-2].split())


# ------------------------------------------------------------------------------------------------------- the package


def test_the_version_is_written_once() -> None:
    done = subprocess.run(
        [sys.executable, "setup.py", "--version"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.split()[-1] == megatron_rl.__version__


@pytest.mark.parametrize(
    ("room", "heavy"),
    [
        ("megatron_rl/config", {"torch", "transformers", "megatron"}),
        ("megatron_rl/monitor/metrics.py", {"torch", "transformers", "megatron"}),
        ("megatron_rl/cli.py", {"torch", "transformers", "megatron"}),
        ("megatron_rl/data", {"torch", "megatron"}),
        ("megatron_rl/rewards", {"torch", "megatron"}),
        ("megatron_rl/rollout", {"torch", "megatron"}),
    ],
)
def test_a_light_room_loads_nothing_heavy(room: str, heavy: set[str]) -> None:
    loaded = import_in_a_fresh_process(modules(room))
    assert not heavy & loaded


def test_every_module_imports() -> None:
    assert "megatron_rl.train" in import_in_a_fresh_process(modules("megatron_rl"))


def test_every_import_is_declared_in_setup_py() -> None:
    setup = (ROOT / "setup.py").read_text("utf-8")
    declared = set(re.findall(r'"([a-z0-9-]+)(?:\[[a-z]+\])?[><=]=', setup))
    ours = {"megatron_rl", "tests", "tools"}
    third_party = {
        name.partition(".")[0] for path in files(".py") if path.name != "setup.py" for name in imported_modules(path)
    } - set(sys.stdlib_module_names)
    wanted = {PROVIDED_BY.get(name, name) for name in third_party - ours - NOT_FROM_PYPI - COMPARED_WITH}
    assert wanted <= declared


def test_pins_cover_every_declared_requirement_of_the_first_tier() -> None:
    setup = ast.literal_eval(_assigned("BASE")) + [
        need for extra in ("cpu", "dev") for need in ast.literal_eval(_assigned("EXTRAS"))[extra]
    ]
    pins = dict(
        line.split("==") for line in (ROOT / "constraints-cpu.txt").read_text().split("\n") if line and line[0] != "#"
    )
    pins = {name.lower().replace("_", "-"): version for name, version in pins.items()}
    bounds = dict(need.split(">=") for need in setup)
    assert bounds == {name: pins.get(name) for name in bounds}


def _assigned(name: str) -> str:
    for node in tree(ROOT / "setup.py").body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return ast.unparse(node.value)
    raise AssertionError(f"setup.py does not assign {name}")


# ---------------------------------------------------------------------------------------------------------- the rooms


def test_every_room_has_an_import_contract() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    guarded = {
        module for contract in settings["tool"]["importlinter"]["contracts"] for module in contract["source_modules"]
    }
    rooms = {f"megatron_rl.{path.name}" for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert rooms - guarded == set()


@pytest.mark.parametrize("room", ["config", "data", "rollout", "rewards", "engines", "algorithms", "monitor"])
def test_a_room_without_ranks_does_not_import_torch_distributed(room: str) -> None:
    users = {
        relative(path)
        for path in files(".py")
        if PACKAGE / room in path.parents
        and any(name.startswith("torch.distributed") for name in imported_modules(path))
    }
    assert users == ({"megatron_rl/engines/embedded/groups.py"} if room == "engines" else set())  # receives broadcasts


# ---------------------------------------------------------------------------------------------------------- the files


def test_every_module_begins_with_a_docstring() -> None:
    assert [
        relative(path) for path in files(".py") if PACKAGE in path.parents and not ast.get_docstring(tree(path))
    ] == []


def test_no_file_grows_over_400_lines_without_a_reason() -> None:
    long = {relative(path) for path in files(".py", ".sh") if path.read_text("utf-8").count("\n") > 400}
    assert long == set(LONG_FILES)


def test_no_function_grows_over_60_lines_without_a_reason() -> None:
    long = {
        f"{relative(path)}::{node.name}"
        for path in files(".py")
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (node.end_lineno or 0) - node.lineno >= 60
    }
    assert long == set(LONG_FUNCTIONS)


def test_no_file_names_a_folder_of_the_machine_it_was_written_on() -> None:
    machine = re.compile(r"(?<![\w.$}])/(?:" + "|".join(["work", "root", "home", "Users", "opt"]) + r")/\w")
    named = {
        f"{relative(path)}: {match.group()}"
        for path in files(".py", ".sh", ".md", ".yaml", ".yml", ".toml", ".txt", ".cfg", ".json", "")
        for match in machine.finditer(path.read_text("utf-8"))
        if match.group() != "/opt/h"  # /opt/homebrew, where a Mac keeps Python
    }
    assert named == set()


SCRIPTS = [relative(path) for path in files(".sh", ".sbatch")] + [".ci/run"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_parses_and_can_be_executed(script: str) -> None:
    path = ROOT / script
    subprocess.run(["bash", "-n", path], check=True, timeout=60)
    assert path.stat().st_mode & 0o111 or path.name == "lib.sh"


@pytest.mark.parametrize("document", [relative(path) for path in files(".md")])
def test_every_relative_link_leads_to_a_file(document: str) -> None:
    path = ROOT / document
    links = re.findall(r"\]\((?!https?:|mailto:|#)([^)#\s]+)", path.read_text("utf-8"))
    assert [link for link in links if not (path.parent / link).exists()] == []
