"""What travels between controller and trainer, and into checkpoints, as typed binary (safetensors). No HTTP here.

RolloutTable   one row per sample of a step, without tokens: enough to compute advantages and plan micro-batches
RolloutShard   tokens, masks and log-probs of chosen rows: what one data-parallel rank trains on
groups         whole finished groups, for checkpoints
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray
from safetensors.numpy import load, save

from megatron_rl.routes import RoutePart

from .sample import Group, Sample, Span

COMPONENT = "component/"
Gaps = Mapping[str, Sequence[float | None]]
"""What the trainer tells of each row of a table, None for one that was not trained on: gap_mean_abs and gap_max_abs,
differences of log-probs, trainer to engine, over its trainable tokens; routing_mismatch, the share of (token, layer)
with other experts."""


def encode(arrays: dict[str, NDArray[Any]], metadata: dict[str, Any]) -> bytes:
    """Named arrays and JSON-able values as one safetensors blob."""
    contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    return save(contiguous, {name: orjson.dumps(value).decode() for name, value in metadata.items()})


def decode(blob: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    """Inverse of `encode`. Raises ValueError when the blob is cut off or something else."""
    try:
        arrays = load(blob)
        header = orjson.loads(blob[8 : 8 + int.from_bytes(blob[:8], "little")])
        return arrays, {name: orjson.loads(text) for name, text in header.get("__metadata__", {}).items()}
    except Exception as error:  # the library has its own exception, which is a plain Exception
        raise ValueError(f"{len(blob)} bytes that are not a safetensors blob of ours: {error}") from error


@dataclass(frozen=True)
class RolloutTable:
    """One row per sample, ordered by group id, then by position in the group; all arrays have shape [B].

    group_index int64, counted from 0 in this table; reward and correctness float64 (NaN where a verifier could not
    tell); prompt_length, response_length, trainable_tokens int64; valid: the reward is a number; truncated: cut at the
    token limit; version_first/last int64: oldest and newest weights that sampled a token; informative: raw correctness
    varies in its group. Samples that must not be trained on have trainable_tokens 0.
    components: float64 [B] per verifier. metrics: `rollout/...` numbers of the step.
    """

    group_index: NDArray[np.int64]
    reward: NDArray[np.float64]
    correctness: NDArray[np.float64]
    prompt_length: NDArray[np.int64]
    response_length: NDArray[np.int64]
    trainable_tokens: NDArray[np.int64]
    valid: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    version_first: NDArray[np.int64]
    version_last: NDArray[np.int64]
    informative: NDArray[np.bool_]
    sample_ids: list[str]
    sources: list[str]
    components: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.sample_ids)

    @classmethod
    def of(cls, groups: Sequence[Group], sources: Sequence[str], metrics: dict[str, float]) -> RolloutTable:
        """Rows of `groups`, which must be in ascending order of id; `sources` has one entry per group."""
        samples = [s for g in groups for s in g.samples]
        sizes = [len(g.samples) for g in groups]
        names = sorted({name for s in samples for name in s.components})
        return cls(
            group_index=np.repeat(np.arange(len(groups), dtype=np.int64), sizes),
            reward=np.array([s.reward for s in samples], np.float64),
            correctness=np.array([s.correctness for s in samples], np.float64),
            prompt_length=np.array([s.prompt_length for s in samples], np.int64),
            response_length=np.array([s.response_length for s in samples], np.int64),
            trainable_tokens=np.array([s.trainable_tokens for s in samples], np.int64),
            valid=np.array([s.valid for s in samples], np.bool_),
            truncated=np.array([s.truncated for s in samples], np.bool_),
            version_first=np.array([s.version_first for s in samples], np.int64),
            version_last=np.array([s.version_last for s in samples], np.int64),
            informative=np.repeat(np.array([g.informative for g in groups], np.bool_), sizes),
            sample_ids=[s.id for s in samples],
            sources=[source for source, size in zip(sources, sizes, strict=True) for _ in range(size)],
            components={n: np.array([s.components.get(n, np.nan) for s in samples], np.float64) for n in names},
            metrics=metrics,
        )

    def to_bytes(self) -> bytes:
        """Typed binary form."""
        arrays = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _TABLE_METADATA}
        arrays |= {COMPONENT + name: array for name, array in self.components.items()}
        return encode(arrays, {"sample_ids": self.sample_ids, "sources": self.sources, "metrics": self.metrics})

    @classmethod
    def from_bytes(cls, blob: bytes) -> RolloutTable:
        """Inverse of `to_bytes`."""
        arrays, metadata = decode(blob)
        components = {n.removeprefix(COMPONENT): arrays.pop(n) for n in list(arrays) if n.startswith(COMPONENT)}
        return cls(components=components, **arrays, **metadata)


_TABLE_METADATA = ("sample_ids", "sources", "components", "metrics")


@dataclass(frozen=True)
class RolloutShard:
    """Ragged sequences, prompt and response together, in the order asked for.

    tokens int64 [T]; offsets int64 [S+1]; mask bool [T], True on trainable response tokens; behaviour_log_probs float32
    [T], aligned with the token they belong to, 0 on the prompt; temperature float32 [S]; sample_ids, S names; routes:
    for each sequence where its routes of experts lie, no more.
    """

    tokens: NDArray[np.int64]
    offsets: NDArray[np.int64]
    mask: NDArray[np.bool_]
    behaviour_log_probs: NDArray[np.float32]
    temperature: NDArray[np.float32]
    sample_ids: list[str]
    routes: list[list[RoutePart]]

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> RolloutShard:
        """Concatenate prompts and responses of `samples`."""
        lengths = [s.prompt_length + s.response_length for s in samples]
        return cls(
            tokens=_ragged([a for s in samples for a in (s.prompt_tokens, s.response_tokens)], np.int64),
            offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            mask=_ragged([a for s in samples for a in (np.zeros(s.prompt_length, np.bool_), s.loss_mask)], np.bool_),
            behaviour_log_probs=_ragged(
                [a for s in samples for a in (np.zeros(s.prompt_length, np.float32), s.log_probs)], np.float32
            ),
            temperature=np.array([s.temperature for s in samples], np.float32),
            sample_ids=[s.id for s in samples],
            routes=[s.routes for s in samples],
        )

    def to_bytes(self) -> bytes:
        """Typed binary form."""
        arrays = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("sample_ids", "routes")}
        routes = [[list(part) for part in parts] for parts in self.routes]
        return encode(arrays, {"sample_ids": self.sample_ids, "routes": routes})

    @classmethod
    def from_bytes(cls, blob: bytes) -> RolloutShard:
        """Inverse of `to_bytes`."""
        arrays, metadata = decode(blob)
        routes = [_parts(parts) for parts in metadata.pop("routes")]
        return cls(**arrays, **metadata, routes=routes)


def pack_groups(groups: Sequence[Group]) -> tuple[dict[str, NDArray[Any]], list[dict[str, Any]]]:
    """Per-token arrays of all samples, flat, and the rest as JSON-able values; see `unpack_groups`."""
    samples = [s for g in groups for s in g.samples]
    prompts = [g.samples[0].prompt_tokens for g in groups]
    arrays = {
        "prompt_tokens": _ragged(prompts, np.int64),
        "response_tokens": _ragged([s.response_tokens for s in samples], np.int64),
        "log_probs": _ragged([s.log_probs for s in samples], np.float32),
        "loss_mask": _ragged([s.loss_mask for s in samples], np.bool_),
    }
    return arrays, [_group_values(group) for group in groups]


def unpack_groups(arrays: dict[str, NDArray[Any]], values: Sequence[dict[str, Any]]) -> list[Group]:
    """Inverse of `pack_groups`."""
    take = {name: _Taker(array) for name, array in arrays.items()}
    groups = []
    for value in values:
        prompt = take["prompt_tokens"](value["prompt_length"])
        samples = [_unpack_sample(entry, value["id"], prompt, take) for entry in value["samples"]]
        groups.append(Group(value["id"], value["prompt_id"], value["version"], samples))
    return groups


_AS_THEY_ARE = ("id", "temperature", "seed", "finish_reason", "text", "environment_reward", "attempts")
"""Fields of a sample that are the same in JSON."""


def _unpack_sample(entry: dict[str, Any], group_id: int, prompt: NDArray[np.int64], take: dict[str, _Taker]) -> Sample:
    length = entry["response_length"]
    return Sample(
        **{name: entry[name] for name in _AS_THEY_ARE},
        group_id=group_id,
        prompt_tokens=prompt,
        response_tokens=take["response_tokens"](length),
        log_probs=take["log_probs"](length),
        loss_mask=take["loss_mask"](length),
        spans=[Span(*span) for span in entry["spans"]],
        observations=[(start, end) for start, end in entry["observations"]],
        correctness=_number(entry["correctness"]),
        components={name: _number(value) for name, value in entry["components"].items()},
        reward=_number(entry["reward"]),
        routes=_parts(entry["routes"]),
    )


def _parts(values: Iterable[Iterable[Any]]) -> list[RoutePart]:
    return [RoutePart(*value) for value in values]


def _number(value: float | None) -> float:
    """JSON has no NaN: it was written as null."""
    return float("nan") if value is None else value


def _group_values(group: Group) -> dict[str, Any]:
    return {
        "id": group.id,
        "prompt_id": group.prompt_id,
        "version": group.version,
        "prompt_length": group.samples[0].prompt_length,
        "samples": [_sample_values(s) for s in group.samples],
    }


def _sample_values(sample: Sample) -> dict[str, Any]:
    names = (*_AS_THEY_ARE, "observations", "correctness", "components", "reward", "response_length")
    tuples = {"spans": [list(span) for span in sample.spans], "routes": [list(part) for part in sample.routes]}
    return {name: getattr(sample, name) for name in names} | tuples


class _Taker:
    """Cuts pieces from the front of a flat array."""

    def __init__(self, array: NDArray[Any]) -> None:
        self._array, self._position = array, 0

    def __call__(self, length: int) -> NDArray[Any]:
        self._position += length
        return self._array[self._position - length : self._position]


def _ragged(parts: Sequence[NDArray[Any]], dtype: type) -> NDArray[Any]:
    return np.concatenate(parts) if parts else np.empty(0, dtype)
