"""One cluster for all tests of this folder; each test submits its own jobs to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.runs import make_inputs

from .minislurm import MiniSlurm, cluster, why_not


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MiniSlurm]:
    """A running Slurm with four nodes; `tmp_path` is the shared file system."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with cluster(shared=[tmp_path_factory.getbasetemp()]) as running:
        yield running


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model and prompts of the quickstart, few of them."""
    return make_inputs(tmp_path_factory.mktemp("inputs"), prompts=16, eval_prompts=8, sft_prompts=64)


@pytest.fixture(autouse=True)
def _no_jobs_left_behind(slurm: MiniSlurm) -> Iterator[None]:
    """A failed test must not keep the nodes from the next one."""
    yield
    slurm.end_jobs()
