"""The bytes between controller and workers: a length of 4 bytes, then arrays and JSON values as in `wire.py`.

Never pickle: what an engine answered cannot run code in the controller.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

import numpy as np

from megatron_rl.routes import RoutePart

from ..protocol import (
    EngineBusy,
    EngineError,
    Generation,
    GenerationAborted,
    Prompt,
    ProtocolError,
    ReplicaError,
    RequestLost,
    SamplingSettings,
    TransportError,
)
from ..sample import Span
from ..wire import decode, encode

LENGTH = struct.Struct("<I")
KINDS = (EngineBusy, EngineError, GenerationAborted, ProtocolError, ReplicaError, RequestLost, TransportError)
ERRORS = {kind.__name__: kind for kind in KINDS}
Arrays = dict[str, Any]
Values = dict[str, Any]


def frame(arrays: Arrays, values: Values) -> bytes:
    """One frame."""
    body = encode(arrays, values)
    return LENGTH.pack(len(body)) + body


async def read(stream: asyncio.StreamReader) -> tuple[Arrays, Values] | None:
    """The next frame, None at the end of the stream."""
    try:
        header = await stream.readexactly(LENGTH.size)
        return decode(await stream.readexactly(LENGTH.unpack(header)[0]))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def request(number: int, url: str, prompts: Sequence[Prompt]) -> bytes:
    """Asks for one exchange."""
    arrays = {"tokens": np.concatenate([p.tokens for p in prompts]), "lengths": _lengths([p.tokens for p in prompts])}
    entries = [[p.rid, p.seed, p.max_new_tokens, astuple(p.settings), p.cache_key, p.routed] for p in prompts]
    return frame(arrays, {"number": number, "url": url, "prompts": entries})


def from_request(arrays: Arrays, values: Values) -> tuple[str, list[Prompt]]:
    """URL and prompts of a request."""
    tokens = _split(arrays["tokens"], arrays["lengths"])
    prompts = []
    for (rid, seed, max_new_tokens, settings, cache_key, routed), ids in zip(values["prompts"], tokens, strict=True):
        temperature, longest, stop, *rest = settings
        sampling = SamplingSettings(temperature, longest, tuple(stop), *rest)
        prompts.append(Prompt(rid, ids, seed, max_new_tokens, sampling, cache_key, routed))
    return values["url"], prompts


PING = frame({}, {"ping": True})
"""Asks whether the other end still reads; what it answers is the same."""


def cancel(number: int) -> bytes:
    """Takes a request back."""
    return frame({}, {"number": number, "cancel": True})


def answer(number: int, generations: Sequence[Generation]) -> bytes:
    """Answers a request."""
    arrays = {
        "tokens": np.concatenate([g.tokens for g in generations]),
        "log_probs": np.concatenate([g.log_probs for g in generations]),
        "lengths": _lengths([g.tokens for g in generations]),
    }
    entries = [
        [g.finish_reason, g.message, [list(span) for span in g.spans], None if g.routes is None else list(g.routes)]
        for g in generations
    ]
    return frame(arrays, {"number": number, "generations": entries})


def failure(number: int, error: EngineError) -> bytes:
    """Answers a request that failed."""
    kind = next(name for name, kind in ERRORS.items() if type(error) is kind)
    return frame({}, {"number": number, "error": [kind, str(error)]})


def from_answer(arrays: Arrays, values: Values) -> list[Generation]:
    """What was generated. Raises the error that the exchange raised."""
    if "error" in values:
        kind, message = values["error"]
        raise ERRORS[kind](message)
    tokens = _split(arrays["tokens"], arrays["lengths"])
    log_probs = _split(arrays["log_probs"], arrays["lengths"])
    found = []
    for (reason, message, spans, routes), ids, each in zip(values["generations"], tokens, log_probs, strict=True):
        part = None if routes is None else RoutePart(*routes)
        found.append(Generation(ids, each, [Span(*span) for span in spans], reason, message, routes=part))
    return found


def _lengths(parts: Sequence[Any]) -> Any:
    return np.array([len(part) for part in parts], np.int64)


def _split(flat: Any, lengths: Any) -> list[Any]:
    return np.split(flat, np.cumsum(lengths)[:-1])
