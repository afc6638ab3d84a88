"""Engines and trainer on the same devices: who gives up what, when. What a rank can move is in `policy.offload`.

    turn      devices hold, of the trainer        of the engines       meanwhile
    engines   weights                             weights, KV cache    sampling, evaluation
    trainer   weights, gradients, optimizer       nothing              log-probs, updates, checkpoints

    engines -> trainer   nothing in flight, pause, release of KV cache and weights, training state to the devices
    trainer -> engines   training state to the host, memory for weights, new weights, memory for KV cache, continue

The engines' weights are lost when they are released: each of their turns begins with a weight update. A checkpoint in
the engines' turn only borrows the memory of their KV caches.

Memory of an engine that has died is free, and an engine that was started again has all of its own: by their process ids
(RUN/endpoints) both are told from one that waits without memory. Whether an engine that gave no answer in time has done
what it was told is not known: nothing more is asked of its memory until its process is another one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch.distributed as dist

from megatron_rl.cluster.rank_zero import RankZero
from megatron_rl.cluster.run_dir import RunDir
from megatron_rl.cluster.turn import set_turn
from megatron_rl.rollout.control import EngineControl
from megatron_rl.rollout.endpoint import engine_pids
from megatron_rl.rollout.protocol import EngineError, TransportError

log = logging.getLogger(__name__)
KV_CACHE, WEIGHTS = "kv_cache", "weights"
Tags = frozenset[str]
Call = tuple[str, dict[str, Any]]
PAUSE: Call = ("/pause_generation", {"mode": "retract"})
CONTINUE: Call = ("/continue_generation", {})


class Devices:
    """Trainer and engines have devices of their own: nothing is handed over."""

    are_shared = False

    def to_trainer(self) -> None:
        """Before log-probs and updates; may be called again in the trainer's turn. Collective."""

    def to_engines(self) -> None:
        """Before a weight update. Collective."""

    def weights_are_loaded(self) -> None:
        """In a weight update, before engines continue; on rank 0."""

    @contextmanager
    def training_state(self) -> Iterator[None]:
        """Within the block the training state is on the devices, whose turn it ever is. Collective."""
        yield


class EngineMemory:
    """Device memory of the engines, as rank 0 sees it; remembers what is released, and asks for nothing twice.

    Args:
        engines: all of them.
        run: where those that the run has started publish their process ids.
    """

    def __init__(self, engines: EngineControl, run: RunDir) -> None:
        self._engines, self._run = engines, run
        self._released: dict[str, Tags] = {}
        self._unknown: set[str] = set()
        """Gave no answer; SGLang's scheduler dies of being asked twice."""
        self._pids: dict[str, int] = {}

    def release_all(self) -> None:
        """What the trainer's turn begins with. Raises EngineError as `release`."""
        self.release((KV_CACHE, WEIGHTS))

    def release(self, tags: Sequence[str], timeout_s: float | None = None) -> None:
        """Pause all engines (SGLang's scheduler dies of a release while requests run), then have them give up memory.

        Args:
            timeout_s: another deadline than `engine.update_timeout_s`.

        Raises:
            EngineError: an engine that runs keeps it; one that has died has none.
        """
        set_turn(self._run.endpoints, trainer=True)
        self._forget_restarted()
        steps = {}
        for url in self._engines.urls:
            wanted = [tag for tag in tags if tag not in self._released.get(url, ())]
            if wanted and url not in self._unknown:
                steps[url] = [PAUSE, ("/release_memory_occupation", {"tags": wanted})]
        self._settle("release of device memory", steps, timeout_s, lambda released: released | {*tags})

    def resume(self, tags: Sequence[str], timeout_s: float | None = None) -> None:
        """Let engines take back what they have released of this.

        Raises:
            EngineError: an engine that runs cannot.
        """
        set_turn(self._run.endpoints, trainer=False)
        self._forget_restarted()
        steps: dict[str, list[Call]] = {}
        for url, released in self._released.items():
            if wanted := [tag for tag in tags if tag in released]:
                steps[url] = [("/resume_memory_occupation", {"tags": wanted})]
        self._settle("return of device memory", steps, timeout_s, lambda released: released - {*tags})

    def go_on(self, timeout_s: float | None = None) -> None:
        """Let all engines generate again but those that are without memory, also any that were only paused.

        One of which that is not known either can, or ends of it and is started again.
        """
        urls = [url for url in self._engines.urls if not self._released.get(url)]
        found = self._engines.each("end of the pause", {url: [CONTINUE] for url in urls}, timeout_s)
        for error in found.values():
            if error:
                log.warning("%s", error)

    def _settle(
        self, what: str, steps: dict[str, list[Call]], timeout_s: float | None, change: Callable[[Tags], Tags]
    ) -> None:
        """Take `steps`; `change` what those have released that did all of theirs, then raise an error of the others."""
        results = self._engines.each(what, steps, timeout_s)
        refused = []
        for url, error in results.items():
            if error is None:
                self._released[url] = change(self._released.get(url, frozenset()))
            elif isinstance(error, TransportError):
                log.warning("%s: going on without it: %s", what, error)
                self._released.pop(url, None)
                self._unknown.add(url)
            else:
                refused.append(str(error))
        if refused:
            raise EngineError(f"{what}: {'; '.join(refused)}")

    def _forget_restarted(self) -> None:
        """A new process has released nothing yet; SGLang's scheduler dies when it is told to take that back."""
        pids = engine_pids(self._run.path, self._engines.urls)
        for url in [url for url in (*self._released, *self._unknown) if pids.get(url) != self._pids.get(url)]:
            log.warning("engine %s was started again while its memory was released", url)
            self._released.pop(url, None)
            self._unknown.discard(url)
        self._pids = pids


class TrainingState(Protocol):
    """What a rank moves, see `policy.offload.TrainingMemory`."""

    def to_host(self) -> int: ...

    def to_device(self) -> None: ...


class SharedDevices(Devices):
    """Trainer and engines share their devices. It is the trainer's turn when this is made.

    Args:
        state: of this rank.
        engines: used on rank 0 only; they have released all.
        zero: shares what rank 0 learns.
        timeout_s: of a turn's change.
        brief_s: of engines that lend or get back memory for a checkpoint, which must not wait for them for long.
        barrier: of all ranks.
    """

    are_shared = True

    def __init__(
        self,
        state: TrainingState,
        engines: EngineMemory,
        zero: RankZero,
        timeout_s: float,
        brief_s: float,
        barrier: Callable[[], None] = dist.barrier,
    ) -> None:
        self._state, self._engines, self._zero, self._barrier = state, engines, zero, barrier
        self._timeout_s, self._brief_s = timeout_s, brief_s
        self._is_trainers = True

    def to_trainer(self) -> None:
        if self._is_trainers:
            return
        self._on_zero("engines give up their memory", self._engines.release_all)
        self._state.to_device()
        self._is_trainers = True

    def to_engines(self) -> None:
        if self._is_trainers:
            self._leave()
        self._on_zero("engines take memory for weights", lambda: self._engines.resume([WEIGHTS]))
        self._is_trainers = False

    def weights_are_loaded(self) -> None:
        self._engines.resume([KV_CACHE])

    @contextmanager
    def training_state(self) -> Iterator[None]:
        if self._is_trainers:
            yield
            return
        self._on_zero("engines lend memory", self._borrow)
        self._state.to_device()
        yield
        self._leave()
        self._on_zero("engines get memory back", self._give_back)

    def _borrow(self) -> None:
        """A run that is to end must be saved whatever becomes of its engines."""
        try:
            self._engines.release([KV_CACHE], timeout_s=self._brief_s)
        except EngineError as error:
            log.warning("saving beside engines that keep their memory: %s", error)

    def _give_back(self) -> None:
        try:
            self._engines.resume([KV_CACHE], timeout_s=self._brief_s)
        except EngineError as error:
            log.warning("after the checkpoint: %s", error)
        self._engines.go_on(self._brief_s)

    def _leave(self) -> None:
        self._state.to_host()
        self._barrier()  # what rank 0 lets engines do next needs the memory of all ranks

    def _on_zero(self, what: str, call: Callable[[], None]) -> None:
        self._zero.run(what, call, self._timeout_s + 30)
