"""Which errors end a trainer rank with their message alone; a run to its end is tested in e2e."""

from __future__ import annotations

import sys

from megatron_rl.bring_up import EXPECTED_ERRORS

OF_OTHER_PROCESSES = {
    "LedgerError",
    "NodelistError",
    "SamplingError",
    "RewardError",
    "RunDirError",
    "RunFailed",
    "SlurmError",
}
"""Controller and launchers; a rank gets them as ControllerError, or never."""


def test_every_error_that_says_what_to_do_ends_a_rank_without_a_traceback() -> None:
    """All classes of the rooms that a rank has loaded, so that a new one cannot be forgotten."""
    found = {
        value
        for name, module in sys.modules.items()
        if name.startswith("megatron_rl") and not name.startswith("megatron_rl.engines")
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Exception) and value.__module__.startswith("megatron_rl")
    }
    errors = {error for error in found if error.__name__.endswith("Error") and ".engines." not in error.__module__}
    left_out = {error.__name__ for error in errors if not issubclass(error, EXPECTED_ERRORS)}
    assert left_out <= OF_OTHER_PROCESSES
    assert len(errors) > 10
