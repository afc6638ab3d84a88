"""Section `cluster:`, deadlines of the processes that make one run."""

from __future__ import annotations

from pydantic import Field

from .base import Section


class ClusterConfig(Section):
    """How long processes wait for each other."""

    collective_timeout_s: float = Field(600.0, gt=0)
    """Deadline of one collective between trainer ranks."""
    start_timeout_s: float = Field(300.0, gt=0)
    """Deadline for controller and engines to come up."""
    stop_timeout_s: float = Field(30.0, gt=0)
    """Time given to a process to end by itself before it is killed."""
