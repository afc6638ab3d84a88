"""Weights over process groups: one for each sender and each handful of engines, made for one update.

    first rank of each pipeline stage    gathers its stage bucket by bucket and broadcasts to all its groups
    its tensor and expert peers          take part in the gathering
    all other ranks                      look into the store, now and then, for how it went

Stages send one after the other: an engine takes one bucket at a time, and two stages that waited for different engines
would wait for each other. What is sent while the next bucket is gathered, and the two buffers for that, is all the
memory it takes. Groups are not kept for the next update: an engine that was restarted meanwhile is not in the old one,
and a broadcast to it would be waited for in vain.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from megatron_rl.weights.export import export_buckets
from megatron_rl.weights.transports.group import Backend, UpdateGroup, join_all
from megatron_rl.weights.transports.sending import Sending, Settings


@dataclass(frozen=True)
class BroadcastSettings(Settings):
    """How to send.

    Attributes:
        replicas_per_group: engines that share a process group, and its fate.
        engine_tp: tensor-parallel ranks of each engine.
        backend: nccl from devices to devices, gloo through the host.
        bucket_timeout_s: deadline of meeting in a group, and of each bucket.
        timeout_s: deadline of all.
    """

    replicas_per_group: int
    engine_tp: int
    backend: Backend
    bucket_timeout_s: float = 120.0
    timeout_s: float = 600.0


class Broadcast(Sending):
    """See the module's docstring and `Sending`."""

    _settings: BroadcastSettings

    @cached_property
    def _run(self) -> str:
        """In the names of its groups: engines may remember those of an earlier trainer."""
        return secrets.token_hex(4)

    def send(self, version: int, urls: Sequence[str]) -> dict[str, str]:
        """See `Transport.send`."""
        self._epoch += 1
        place, failed = self._place, {}
        if place.exports and place.stage:
            failed = self._outcome_of(place.stage - 1)
        if place.sends:
            try:
                failed |= self._send_stage([url for url in urls if url not in failed])
            except BaseException as error:
                self._mail.post(self._turn(place.stage), dict.fromkeys(urls, f"the trainer failed: {error}"))
                raise
            self._mail.post(self._turn(place.stage), failed)
            self._mail.burn(self._turn(place.stage, self._epoch - 2))  # a whole update ago: all have read it
        elif place.exports:
            for _ in export_buckets(self._plan(), None, place):
                pass
        return self._outcome_of(place.stages - 1)

    def _send_stage(self, urls: list[str]) -> dict[str, str]:
        s = self._settings
        parts = [urls[i : i + s.replicas_per_group] for i in range(0, len(urls), s.replicas_per_group)]
        names = (f"{self._run}-{self._epoch}-stage{self._place.stage}-{number}" for number in range(len(parts)))
        groups = [
            UpdateGroup(self._engines, part, s.engine_tp, name, s.backend, s.bucket_timeout_s, self._interrupted)
            for part, name in zip(parts, names, strict=True)
        ]
        join_all(groups)
        # Also when all groups have failed: this rank's peers gather the whole stage with it.
        for bucket, flat in export_buckets(self._plan(), "cpu" if s.backend == "gloo" else "cuda", self._place):
            assert flat is not None
            for group in groups:
                group.finish()
            for group in groups:
                group.start(bucket, flat)
        for group in groups:
            group.finish()
        for group in groups:
            group.close()
        return {url: reason for group in groups for url, reason in (group.failed or {}).items()}

    def _outcome_of(self, stage: int) -> dict[str, str]:
        what = f"the weights of pipeline stage {stage} to reach the engines"
        failed: dict[str, str] = self._mail.take(self._turn(stage), self._settings.timeout_s, what)
        return failed

    def _turn(self, stage: int, epoch: int | None = None) -> str:
        return f"{self._epoch if epoch is None else epoch}/{stage}"
