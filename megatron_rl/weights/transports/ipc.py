"""Weights for engines on the trainer's own devices: handles of memory, or on a CPU the values themselves, over HTTP.

Every trainer rank gets every bucket: gathered among the ranks of the stage that holds it, passed on to the other
stages. Rank r serves one tensor-parallel rank of one engine (`partners`), with a handle of its own copy, since a
handle is good on one device only. The first of an engine's partners collects the handles and speaks HTTP. A bucket is
kept until the engine has loaded it.

                rank 0 -- handle -->.                      .--> engine A, rank 0
    buckets     rank 1 -- handle --> rank 0 -- one POST -->'--> engine A, rank 1
                rank 2 -- handle --> rank 2 -- one POST ------> engine B, rank 0 ...
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.weights.buckets import Bucket
from megatron_rl.weights.export import export_buckets
from megatron_rl.weights.transports.handles import handle_payload, value_payload
from megatron_rl.weights.transports.sending import Sending, Settings

POLL_S = 0.001


@dataclass(frozen=True)
class IpcSettings(Settings):
    """How to send.

    Attributes:
        partners: by URL, the trainer rank on the device of each of the engine's tensor-parallel ranks. Without devices
            of their own (on a CPU), one rank may serve all.
        by_value: send the bytes instead of handles.
        bucket_timeout_s: deadline of each bucket.
    """

    partners: dict[str, list[int]]
    by_value: bool
    bucket_timeout_s: float = 120.0


class Ipc(Sending):
    """See the module's docstring and `Sending`."""

    _settings: IpcSettings

    everywhere = True

    @property
    def _rank(self) -> int:
        return dist.get_rank()

    def send(self, version: int, urls: Sequence[str]) -> dict[str, str]:
        """See `Transport.send`."""
        self._epoch += 1
        partners = {url: ranks for url, ranks in self._settings.partners.items() if url in urls}
        mine = [url for url, ranks in partners.items() if self._rank == ranks[0]]
        failed: dict[str, str] = {}
        for number, (bucket, flat) in enumerate(self._buckets_of_all_stages()):
            self._offer(number, partners, bucket, flat)
            failed |= self._deliver(number, {url: partners[url] for url in mine}, failed, bucket, flat)
            self._await_loading(number, partners)
        strangers = {url: f"engine {url} shares no device with the trainer" for url in urls if url not in partners}
        return strangers | self._share(failed, partners)

    # ------------------------------------------------------------------------------------------------ all the stages

    def _buckets_of_all_stages(self) -> Iterator[tuple[Bucket, Tensor]]:
        """Every bucket of the model, on every rank, stage after stage. Collective."""
        from megatron.core import parallel_state

        device = torch.device("cpu") if self._settings.by_value else torch.device("cuda", torch.cuda.current_device())
        group = parallel_state.get_pipeline_model_parallel_group()
        ranks = dist.get_process_group_ranks(group)
        own = self._plan()
        for stage, source in enumerate(ranks):
            plans: list[Any] = [own.buckets if stage == self._place.stage else None]
            if len(ranks) > 1:
                dist.broadcast_object_list(plans, src=source, group=group)
            if stage == self._place.stage:
                for bucket, flat in export_buckets(own, device, self._place):
                    assert flat is not None
                    self._pass_on(flat[: bucket.nbytes], source, group)
                    yield bucket, flat
            else:
                flat = torch.empty(max(bucket.nbytes for bucket in plans[0]), dtype=torch.uint8, device=device)
                for bucket in plans[0]:
                    self._pass_on(flat[: bucket.nbytes], source, group)
                    yield bucket, flat

    def _pass_on(self, flat: Tensor, source: int, group: dist.ProcessGroup) -> None:
        if dist.get_world_size(group) == 1:
            return
        if flat.is_cuda or dist.get_backend(group) == "gloo":
            dist.broadcast(flat, src=source, group=group)
        else:  # values for engines on the CPU, from a trainer on devices
            moved = flat.cuda()
            dist.broadcast(moved, src=source, group=group)
            flat.copy_(moved)

    # ---------------------------------------------------------------------------------------------------- one bucket

    def _offer(self, number: int, partners: dict[str, list[int]], bucket: Bucket, flat: Tensor) -> None:
        """Tell the first partner of an engine how to reach this rank's copy. Values need no other copy than its own."""
        if self._settings.by_value:
            return
        places = [(url, i) for url, ranks in partners.items() for i, rank in enumerate(ranks) if rank == self._rank]
        if places:
            torch.cuda.synchronize()  # an engine reads as soon as it knows
        for url, place in places:
            self._mail.post(f"{self._epoch}/{number}/{url}/{place}", handle_payload(bucket, flat))

    def _deliver(
        self, number: int, mine: dict[str, list[int]], failed: dict[str, str], bucket: Bucket, flat: Tensor
    ) -> dict[str, str]:
        """One POST to each engine of this rank, with a payload for each of its ranks; why it failed, by URL."""
        s = self._settings
        value = value_payload(bucket, flat) if s.by_value and mine else ""
        bodies = {}
        for url, ranks in mine.items():
            payloads = [value] * len(ranks) if s.by_value else self._collect(number, url, len(ranks))
            bodies[url] = {
                "serialized_named_tensors": payloads,
                "load_format": None if s.by_value else "flattened_bucket",
                "flush_cache": False,
                "abort_all_requests": False,
            }
        ready = {url: body for url, body in bodies.items() if url not in failed}
        calls = self._engines.post("/update_weights_from_tensor", ready, s.bucket_timeout_s)
        while not calls.done and not self._interrupted():
            time.sleep(POLL_S)
        failures = {url: str(error) for url, error in calls.so_far().failures.items()}
        if not calls.done:
            calls.cancel()
            failures = {url: f"engine {url}: given up, the run is to end" for url in ready}
        for url in mine:
            self._mail.post(f"{self._epoch}/{number}/{url}/loaded", True)
        return failures

    def _collect(self, number: int, url: str, count: int) -> list[str]:
        """The handles of an engine's partners; who gives one has seen that the bucket before was loaded."""
        names = [f"{self._epoch}/{number}/{url}/{place}" for place in range(count)]
        handles = [self._mail.take(name, self._settings.bucket_timeout_s, "handles of weights") for name in names]
        for name in (*names, f"{self._epoch}/{number - 1}/{url}/loaded"):
            self._mail.burn(name)
        return handles

    def _await_loading(self, number: int, partners: dict[str, list[int]]) -> None:
        """Before the memory of this bucket is used again."""
        if self._settings.by_value:
            return
        for url in (url for url, ranks in partners.items() if self._rank in ranks):
            what = f"engine {url} to load a bucket of weights"
            self._mail.take(f"{self._epoch}/{number}/{url}/loaded", 2 * self._settings.bucket_timeout_s, what)

    def _share(self, failed: dict[str, str], partners: dict[str, list[int]]) -> dict[str, str]:
        """All engines' outcomes, on all ranks."""
        found: dict[str, str] = {}
        for rank in sorted({ranks[0] for ranks in partners.values()}):
            if rank == self._rank:
                self._mail.post(f"{self._epoch}/outcome/{rank}", failed)
                self._mail.burn(f"{self._epoch - 2}/outcome/{rank}")
            timeout_s = 2 * self._settings.bucket_timeout_s
            found |= self._mail.take(f"{self._epoch}/outcome/{rank}", timeout_s, f"rank {rank}'s engines")
        return found
