"""Section `cluster:`, deadlines of the processes that make one run."""

from __future__ import annotations

from pydantic import Field

from .base import Seconds, Section


class ClusterConfig(Section):
    """How long processes wait for each other."""

    collective_timeout_s: Seconds = 600.0
    """Deadline of one collective between trainer ranks."""
    start_timeout_s: Seconds = 300.0
    """Deadline for controller and engines to come up."""
    controller_timeout_s: Seconds = 120.0
    """Deadline of one answer of the controller to the trainer."""
    stop_timeout_s: Seconds = 30.0
    """Time given to a process to end by itself before it is killed."""
    max_engine_restarts: int = Field(3, ge=0)
    """How often an engine that died is started again within engine_restart_window_s before the run ends."""
    engine_restart_window_s: Seconds = 3600.0
    """Restarts longer ago do not count."""
