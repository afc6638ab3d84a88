"""One cluster for all tests of this folder; each test submits its own jobs to it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .minislurm import MiniSlurm, cluster, why_not


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MiniSlurm]:
    """A running Slurm with four nodes; `tmp_path` is the shared file system."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with cluster(shared=[tmp_path_factory.getbasetemp()]) as running:
        yield running


@pytest.fixture(autouse=True)
def _no_jobs_left_behind(slurm: MiniSlurm) -> Iterator[None]:
    """A failed test must not keep the nodes from the next one."""
    yield
    slurm.end_jobs()
