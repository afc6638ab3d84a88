"""The bytes between pool and worker: a length of 4 bytes, then JSON; both ends are in `pool_worker.py` and `worker.py`.

JSON and not pickle: what comes back from a worker, which reads text that a model wrote, cannot run code in the
controller. Non-finite values travel as null.
"""

from __future__ import annotations

import math
import struct
from typing import Any, BinaryIO

import orjson

from megatron_rl.data.records import PromptRecord

from .evaluate import Outcome

LENGTH = struct.Struct("<I")


def encode(value: Any) -> bytes:
    """One frame."""
    body = orjson.dumps(value)
    return LENGTH.pack(len(body)) + body


def read(stream: BinaryIO) -> Any | None:
    """The next value of a blocking stream, or None at its end."""
    header = stream.read(LENGTH.size)
    if len(header) < LENGTH.size:
        return None
    return orjson.loads(stream.read(LENGTH.unpack(header)[0]))


def record_of(value: dict[str, Any]) -> PromptRecord:
    """The record that was sent."""
    return PromptRecord(**{**value, "messages": tuple(value["messages"])})


def reply(outcome: Outcome) -> dict[str, Any]:
    """What a worker answers."""
    return {"values": outcome.values, "errors": [[index, reason] for index, reason in outcome.errors.items()]}


def from_reply(value: dict[str, Any]) -> Outcome:
    """The outcome in a worker's answer."""
    values = tuple(math.nan if number is None else float(number) for number in value["values"])
    return Outcome(values, dict(value["errors"]))
