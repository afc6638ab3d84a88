"""How often processes that parse and hold rollouts look for cyclic garbage. Nothing else is set here."""

from __future__ import annotations

import gc

OBJECTS = 20_000
"""New containers between two looks; Python's own number is 700, which a single answer has."""


def look_less_often() -> None:
    """For a process that has started: what it has loaded is never looked at again, what follows rarely.

    Requests and samples are in no cycles; their memory is given back at once in any case.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(OBJECTS, 50, 100)
