"""The Triton kernels in Triton's interpreter. It must be chosen before triton is first imported, so the checks of
`interpreted` run in one process of their own, and each is reported here under its name."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((Path(__file__).parent / "interpreted").glob("check_*.py"))
CHECKS = [
    f"{path.stem}::{node.name}"
    for path in FILES
    for node in ast.parse(path.read_text("utf-8")).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
]


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Of every check that ran, what failed in it; a check with several parameters is one."""
    report = tmp_path_factory.mktemp("interpreted") / "report.xml"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", f"--junit-xml={report}", "-p", "no:cacheprovider", *map(str, FILES)],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert report.exists(), done.stdout + done.stderr  # a signal ended it: forbidden memory was touched
    found: dict[str, list[str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.attrib['classname'].rpartition('.')[2]}::{case.attrib['name'].partition('[')[0]}"
        problems = [child.text or child.attrib.get("message", "") for child in case if child.tag != "properties"]
        found.setdefault(name, []).extend(problems)
    return found


@pytest.mark.parametrize("check", CHECKS)
def test_in_the_interpreter(check: str, failures: dict[str, list[str]]) -> None:
    assert check in failures, "it did not run"
    assert not failures[check], "\n".join(failures[check])
