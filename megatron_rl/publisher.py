"""New weights from the trainer to the engines, verified: which transport, in which order, and who holds them at last.

    publish     [files] -> pause -> weights (`weights.transports`) -> checksums -> continue -> log-probs
    repair      the same from files, for engines that hold something else

What is said to engines is in `rollout.weight_update`. An engine that fails any part is dirty: it stays paused and out
of the result until it was reloaded as a whole. The run goes on with the others, and ends when there is none.

`RUN/weights/current.json` names weights that are on the disk, for engines that start in mid-run; with other transports
than disk it may name older ones than are published, and an engine that loaded those is repaired.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.cluster.rank_zero import RankZero, unless_ending
from megatron_rl.cluster.run_dir import RunDir
from megatron_rl.cluster.staged import staged_paths
from megatron_rl.config import Config
from megatron_rl.data import PromptTokenizer
from megatron_rl.pins import pinned
from megatron_rl.policy.batch import SequenceBatch
from megatron_rl.policy.distributed import data_parallel_rank, device
from megatron_rl.policy.policy import Policy
from megatron_rl.policy.step_batch import plan_lengths
from megatron_rl.rollout.control import EngineControl, nobody_holds
from megatron_rl.rollout.protocol import EngineError, TransportError
from megatron_rl.rollout.sample import LogProbs
from megatron_rl.rollout.weight_update import Checksums, WeightUpdate
from megatron_rl.weights.current import CurrentWeights, announce, current
from megatron_rl.weights.export import MIB
from megatron_rl.weights.transports import Transport
from megatron_rl.weights.transports.broadcast import Broadcast, BroadcastSettings
from megatron_rl.weights.transports.disk import Disk
from megatron_rl.weights.transports.ipc import Ipc, IpcSettings
from megatron_rl.weights.version_dir import list_versions, prune_versions

T = TypeVar("T")
Kind = Literal["disk", "broadcast", "ipc"]
PROBE_TEXT = "the answer to 12 and 30 is 42, not 24"
PROBE_TOKENS = 24
"""Longest probe: enough for every layer to matter, one forward pass of nearly nothing."""
MARGIN_S = 30.0
"""How much longer the other ranks wait for rank 0 than rank 0 for engines."""
MOMENT_S = 2.0


def choose_transport(cfg: Config, on_devices: bool) -> Kind:
    """What `engine.weight_transport` means here. `on_devices`: the trainer computes on CUDA devices."""
    engine = cfg.engine
    if engine.weight_transport != "auto":
        return engine.weight_transport
    if not on_devices or engine.kind == "embedded" or engine.dp > 1 or engine.stage_in_memory:
        return "disk"
    return "ipc" if cfg.cluster.placement == "colocated" else "broadcast"


def partners_of(urls: Sequence[str], tp: int, world_size: int, by_value: bool) -> dict[str, list[int]]:
    """The trainer rank that gives weights to each tensor-parallel rank of each engine: ranks and devices in one order.

    By value no device is shared, and the engines are dealt to the ranks.

    Raises:
        EngineError: there is no rank on the device of some engine.
    """
    if by_value:
        return {url: [number % world_size] * tp for number, url in enumerate(urls)}
    if len(urls) * tp > world_size:
        raise EngineError(
            f"engine.weight_transport=ipc: {len(urls)} engines of engine.tp={tp} need as many trainer ranks on their "
            f"devices, and there are {world_size}; use engine.weight_transport=disk"
        )
    return {url: list(range(number * tp, (number + 1) * tp)) for number, url in enumerate(urls)}


class Publisher:
    """Every rank has one and calls its methods in the same order.

    Args:
        policy: whose weights are published, as they are at the call.
        zero: shares what rank 0 learns.
        engines: all replicas, used on rank 0; its HTTP also on ranks that send.
        interrupted: whether this rank was told to end: waits for engines are given up.
        stop_arrives: whether rank 0 was, or will be in a moment: engines that end are no failure then.
    """

    def __init__(
        self,
        cfg: Config,
        policy: Policy,
        zero: RankZero,
        engines: EngineControl,
        interrupted: Callable[[], bool],
        stop_arrives: Callable[[], bool],
    ) -> None:
        self.dirty: dict[str, EngineError] = {}
        """On rank 0: why an engine does not hold the weights that were published last."""
        self.checksum: str | None = None
        """On rank 0: of those weights, as engines report it; None where they report none."""
        self._cfg, self._policy, self._zero, self._engines = cfg, policy, zero, engines
        self._interrupted, self._stop_arrives = interrupted, stop_arrives
        self._weights = RunDir(cfg.run_dir).weights
        self._kind = choose_transport(cfg, device().type == "cuda")
        self._dtype = getattr(torch, cfg.engine.weights_dtype(cfg.model.dtype))
        self._bucket_bytes = cfg.engine.bucket_mib * MIB
        self._disk = Disk(
            policy.chunks, policy.hf, cfg.model.path, self._weights, self._dtype, self._bucket_bytes, self._load
        )
        self._transport = self._make()
        self._version = self._written = -1
        self.probes_skipped = 0
        """On rank 0: probes that an engine had not answered by the next update, so far."""
        self._late: WeightUpdate | None = None
        self._reference: dict[int, Checksums] = {}
        self._probe: list[int] = []

    def publish(self, version: int, before_continue: Callable[[], None] = lambda: None) -> list[str]:
        """Give the policy's weights to all engines as `version`. Collective.

        Args:
            before_continue: called on rank 0 when the weights are verified and before engines continue.

        Returns:
            URLs of the engines that hold them; none when the run is to end.

        Raises:
            EngineError: no engine holds them, and none came back in time.
            WeightsError: they could not be written.
        """
        self._version, self._reference, self.checksum = version, {}, None
        self._expected = self._log_probs_of_probe()
        transport = self._disk if self._must_be_on_disk(version) else self._transport
        transport.prepare(version)
        if transport is self._disk:
            self._written = version
        what = f"weights {version} to the engines"
        urls = self._on_zero(f"{what}: pause", lambda: self._pause(version, transport))
        if urls is None:
            return []
        failed = transport.send(version, urls) if urls else {}
        more_s = self._engines.timeout_s  # of `before_continue`
        held = self._on_zero(what, lambda: self._verify(transport, failed, before_continue), more_s)
        if held == []:
            held = self._last_resort(transport, before_continue)
        self._on_zero("old weights", self._prune)
        return held or []

    def repair(self, urls: Sequence[str]) -> list[str]:
        """Reload these engines as a whole, from disk, with the weights that were published last. Collective.

        The policy's weights must be those still: between the publication and the next update.

        Returns:
            URLs of the engines that hold them now.
        """
        self._expected = self._log_probs_of_probe()
        return self._reload(list(urls), lambda: None) or []

    # ----------------------------------------------------------------------------------------------------- the steps

    def _pause(self, version: int, transport: Transport) -> list[str]:
        """One that is dirty gets no part of the weights: it has to be reloaded as a whole."""
        mode, urls = self._cfg.engine.pause_mode, self._engines.urls
        self._judge_late_probes()
        if transport is not self._disk:
            urls = [url for url in urls if url not in self.dirty]
        self._update = self._engines.begin_update(version, urls, self._interrupted)
        if transport is self._disk:
            self._announce()  # what waits for copies counts into the update's deadline
        self._update.pause(mode)
        if transport.in_session:
            self._update.begin()
        return self._update.left

    def _load(self, folder: Path) -> dict[str, str]:
        """The disk transport's second half: who failed, the update itself remembers."""

        def load() -> dict[str, str]:
            flush = self._cfg.engine.pause_mode != "in_place"
            self._update.load_from_disk(folder, self._paths, flush=flush)
            return {}

        return self._on_zero(f"weights {self._version} from disk", load) or {}

    def _verify(self, transport: Transport, failed: dict[str, str], before_continue: Callable[[], None]) -> list[str]:
        self._update.leave_out(failed)
        if transport.in_session:
            self._update.end()
        self._finish(self._update, before_continue)
        if transport is self._disk and self._update.left:
            self._announce(self._update.overall)
        return self._update.left

    def _finish(self, update: WeightUpdate, before_continue: Callable[[], None]) -> None:
        """From the checksums on. What is right once is the reference of those that are reloaded later."""
        update.compare(self._reference)
        before_continue()
        update.resume()
        update.probe(self._probe, self._expected, self._cfg.engine.probe_tolerance)
        update.disown()
        self._judge_late_probes()
        self._late = update
        self._reference |= {len(update.checksums[url]): update.checksums[url] for url in update.left}
        if update.left:
            self.checksum = update.overall
        self.dirty |= update.failed
        for url in update.left:
            self.dirty.pop(url, None)

    def _judge_late_probes(self) -> None:
        """Of engines that were too busy when they got the weights; what they say later is of no interest."""
        if self._late is not None:
            self.dirty |= self._late.late_probe()
            self.probes_skipped += len(self._late.unprobed)
            self._late = None

    def _last_resort(self, transport: Transport, before_continue: Callable[[], None]) -> list[str] | None:
        """No engine got them: wait until one can be reached, and reload it."""

        def ready() -> list[str]:
            error = nobody_holds(self._version, self._update.failed or self.dirty)
            if transport is self._disk and not isinstance(error, TransportError):
                raise error  # what they refuse is what they would get
            patience = max(self._engines.patience_s, MOMENT_S)
            urls = self._engines.wait_for_one(time.monotonic() + patience, self._interrupted)
            if not urls:
                raise error
            return urls

        urls = self._on_zero("an engine to come back", ready, self._engines.patience_s)
        held = None if urls is None else self._reload(urls, before_continue)

        def require() -> list[str]:
            if not held:
                raise nobody_holds(self._version, self.dirty)
            return held

        return None if held is None else self._on_zero("an engine with the new weights", require)

    def _reload(self, urls: list[str], before_continue: Callable[[], None]) -> list[str] | None:
        if self._written != self._version:
            self._disk.prepare(self._version)
            self._written = self._version

        def reload() -> list[str]:
            update = self._update = self._engines.begin_update(self._version, urls, self._interrupted)
            self._announce()
            update.pause("retract")
            update.close_old_session()
            update.load_from_disk(self._disk.path(self._version), self._paths, flush=True)
            self._finish(update, before_continue)
            if update.left:
                self._announce(update.overall)
            return update.left

        what = f"weights {self._version} to {', '.join(urls)}"
        return self._on_zero(what, reload, self._engines.timeout_s)  # of `before_continue`

    # --------------------------------------------------------------------------------------------------------- parts

    def _make(self) -> Transport:
        cfg, policy, store = self._cfg, self._policy, self._zero.store
        tp = 1 if cfg.engine.kind == "embedded" else cfg.engine.tp
        on_device = device().type == "cuda" and cfg.engine.kind != "embedded"
        calls, timeout_s = self._engines.calls, cfg.engine.update_timeout_s
        if self._kind == "broadcast":
            sending = BroadcastSettings(
                self._dtype,
                self._bucket_bytes,
                cfg.engine.replicas_per_group,
                tp,
                "nccl" if on_device else "gloo",
                timeout_s=timeout_s,
            )
            return Broadcast(policy.chunks, policy.hf, sending, calls, store, self._interrupted)
        if self._kind == "ipc":
            partners = partners_of(self._engines.urls, tp, dist.get_world_size(), not on_device)
            giving = IpcSettings(self._dtype, self._bucket_bytes, partners, not on_device)
            return Ipc(policy.chunks, policy.hf, giving, calls, store, self._interrupted)
        return self._disk

    def _must_be_on_disk(self, version: int) -> bool:
        """An engine that starts finds no other weights than announced ones, nor may two weights have one number."""
        if self._transport is self._disk:
            return True

        def look() -> bool:
            announced = current(self._weights)
            return announced is None or announced.version >= version

        return bool(self._on_zero("announced weights", look))

    def _announce(self, checksum: str | None = None) -> None:
        """Before engines load them: one that dies from then on comes back with the new weights. And once verified."""
        folder = self._disk.path(self._version)
        announce(self._weights, CurrentWeights(self._version, str(folder), checksum))
        if checksum is None:
            staged = self._cfg.engine.stage_in_memory
            self._paths = staged_paths(self._cfg, folder, self._interrupted) if staged else {}

    def _prune(self) -> None:
        announced = current(self._weights)
        in_use = [] if announced is None else [announced.version]
        read = pinned(Path(self._cfg.run_dir))
        in_use += [version for version, path in list_versions(self._weights) if path.name in read]
        prune_versions(self._weights, self._cfg.engine.keep_versions, in_use)

    def _on_zero(self, what: str, call: Callable[[], T], more_s: float = 0.0) -> T | None:
        """What rank 0 gets; None when engines fail it since the run is to end."""

        deadline = self._cfg.engine.update_timeout_s + more_s + MARGIN_S
        return self._zero.run(what, lambda: unless_ending(call, EngineError, self._stop_arrives), deadline)

    # ----------------------------------------------------------------------------------------------------- the probe

    def _log_probs_of_probe(self) -> LogProbs:
        """The trainer's, float32 [tokens - 1]. Collective over all ranks."""
        tokens = self._probe = self._probe or self._on_zero("the probe's tokens", self._encode_probe) or []
        plan = plan_lengths([len(tokens)] * self._cfg.parallel.data_parallel_size, self._cfg)
        count = len(plan.sequences(data_parallel_rank()))
        mask = np.arange(len(tokens)) > 0
        batch = SequenceBatch.from_sequences([tokens] * count, [mask] * count, ["probe"] * count)
        return self._policy.log_probs(batch, plan).log_probs[1 : len(tokens)]

    def _encode_probe(self) -> list[int]:
        cfg = self._cfg
        longest = min(PROBE_TOKENS, max(2, cfg.rollout.max_prompt_tokens), cfg.algorithm.max_tokens_per_microbatch)
        tokens = PromptTokenizer(cfg.model.path, chat_template=cfg.data.chat_template).encode_text(PROBE_TEXT)
        return tokens[:longest]
