"""The thread that owns the model: which sequences run, which wait, and what happens between two steps.

    inbox --> commands (abort, pause, update, ...)       always, also while paused
    waiting --> admit --> prefill --> first token         while there is room; what was parked needs no prefill
    running --> decode --> next token --> finished        all running sequences at once; they may be continued: parked

Requests join and leave between steps. The loop waits for: the inbox, when nothing can run (idle or paused). Nothing
else blocks it; a weight update or a checksum is a command and holds up the steps while it runs.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np
import torch

from .batch import Batch
from .decoder import Decoder
from .parked import Parked
from .request import Request, aborted_running, aborted_waiting, failed, out_of_length
from .sampler import sample

log = logging.getLogger(__name__)
T = TypeVar("T")
PARKED_PER_ROW = 4
"""Ended sequences that can be continued without computing them again, for each that can run."""


@dataclass(frozen=True)
class Load:
    """What the engine has to do at this moment."""

    running: int
    waiting: int
    cached_tokens: int


class Scheduler:
    """Start with `start`, end with `stop` and `join`. Commands belong to its thread: others reach them by `call`.

    Args:
        decoder: the model and its cache.
        version: the name of its weights.
        max_running: sequences decoded at once.
        on_finish: called in its thread with the requests that a step or a command ended.
        on_failure: called in its thread, once, when an error has ended the loop.
    """

    def __init__(
        self,
        decoder: Decoder,
        version: str,
        max_running: int,
        on_finish: Callable[[Sequence[Request]], None],
        on_failure: Callable[[], None],
    ) -> None:
        self.version = version
        self.failure: BaseException | None = None
        self._decoder, self._max_running = decoder, max_running
        self._on_finish, self._on_failure = on_finish, on_failure
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._unfinished: set[Request] = set()
        self._waiting: deque[Request] = deque()
        self._batch = Batch(max_running, decoder.forward.vocab_size)
        self._parked = Parked(PARKED_PER_ROW * max_running, decoder.budget // 8)
        self._paused = self._stopping = False
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)

    # ------------------------------------------------------------------------------------------- from any thread
    def start(self) -> None:
        """Begin to step."""
        self._thread.start()

    def join(self, timeout_s: float) -> bool:
        """Wait for the loop to end after `stop`; whether it has."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests, in order; `on_finish` reports each exactly once."""

        def command() -> None:
            self._waiting.extend(requests)
            self._unfinished.update(requests)

        self._inbox.put(command)

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run `function` in the scheduler's thread between two steps; an error when the loop has failed."""
        future: Future[T] = Future()

        def command() -> None:
            try:
                if self.failure is not None:
                    raise RuntimeError(f"the engine has failed: {self.failure!r}")
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        self._inbox.put(command)
        return future

    def stop(self) -> None:
        """End the loop after the present step; what still runs or waits is aborted."""
        self._inbox.put(self._stop)

    # ------------------------------------------------------------------------------------------- this thread only
    def _run(self) -> None:
        """The loop. After an error every request, present or later, ends with it until `stop`."""
        try:
            with torch.inference_mode():
                while not self._stopping:
                    self._run_commands()
                    if not self._paused:
                        self._admit()
                        self._decode()
        except BaseException as error:
            log.exception("the scheduler failed")
            self.failure = error
            self._on_failure()
            while not self._stopping:
                self._finish([(r, failed(f"the engine has failed: {error!r}")) for r in self._unfinished])
                self._inbox.get()()

    def _run_commands(self) -> None:
        if self._paused or not (self._waiting or len(self._batch)):
            self._inbox.get()()  # no deadline: a server waits for work for as long as it lives
        while not self._inbox.empty():  # nobody else takes from it
            self._inbox.get()()

    def _admit(self) -> None:
        """Move waiting requests into the batch while rows and memory last; each distinct prompt is computed once."""
        if not self._waiting:
            return
        admitted: list[Request] = []
        longest = self._batch.final_length
        while self._waiting and len(self._batch) + len(admitted) < self._max_running:
            request = self._waiting[0]
            longest = max(longest, request.final_length)
            count = len(self._batch) + len(admitted) + 1
            if count > 1 and not self._decoder.fits(count, longest):
                break
            admitted.append(self._waiting.popleft())
        self._prefill(self._continue(self._without_empty(admitted)))

    def _without_empty(self, requests: list[Request]) -> list[Request]:
        """Compute what was asked about prompts, and end the requests that want no token."""
        for request in requests:
            if request.scored and request.input_log_probs is None:
                request.input_log_probs = self._decoder.prompt_log_probs(request.prompt)
        empty = [r for r in requests if r.sampling.max_new_tokens == 0]
        self._finish([(r, out_of_length(0)) for r in empty])
        return [r for r in requests if r.sampling.max_new_tokens > 0] if empty else requests

    def _continue(self, requests: list[Request]) -> list[Request]:
        """Let those join whose tokens, but for the last, were computed before; the others."""
        found = [(r, saved) for r in requests if (saved := self._parked.take(r.tokens[:-1])) is not None]
        if not found:
            return requests
        self._decoder.restore([saved for _, saved in found], len(self._batch))
        self._batch.add([request for request, _ in found])
        for request, saved in found:
            request.cached_tokens, request.prefilled = saved.length, True
        joined = {request for request, _ in found}
        return [r for r in requests if r not in joined]

    def _prefill(self, requests: list[Request]) -> None:
        if not requests:
            return
        live = len(self._batch)
        rows = self._batch.add(requests)
        index: dict[bytes, int] = {}
        which = []
        for request in requests:
            key = request.tokens.tobytes()
            if key in index and not request.prefilled:
                request.cached_tokens = len(request.prompt) - 1
            request.prefilled = True
            which.append(index.setdefault(key, len(index)))
        slots: list[list[int]] = [[] for _ in index]
        for row, prompt in enumerate(which, live):
            slots[prompt].append(row)
        prompts = [np.frombuffer(key, np.int64) for key in index]
        logits = self._decoder.prefill(prompts, slots, live)
        self._draw(rows, logits[torch.tensor(which)])

    def _decode(self) -> None:
        if not len(self._batch):
            return
        logits = self._decoder.decode(self._batch.last_tokens, self._batch.positions)
        self._draw(slice(0, len(self._batch)), logits)

    def _draw(self, rows: slice, logits: torch.Tensor) -> None:
        tokens, log_probs = sample(logits, self._batch.sampling(rows))
        self._leave(self._batch.record(rows, tokens, log_probs))

    def _leave(self, reasons: dict[int, dict[str, Any]]) -> None:
        """End the sequences of these rows."""
        if not reasons:
            return
        rows = np.fromiter(reasons, np.int64)
        broken = [row for row, reason in reasons.items() if reason.get("status_code")]
        if broken:
            self._decoder.wipe(np.array(broken))
        ended = [(self._batch.requests[row], reason) for row, reason in reasons.items()]
        for row, (request, _) in zip(reasons, ended, strict=True):
            if request.routed_from is not None:
                end = len(self._batch.cached(row))
                request.routed_experts = self._decoder.routes(row, min(request.routed_from, end), end)
        for row, reason in reasons.items():
            if reason["type"] in ("length", "abort") and row not in broken:
                cached = self._batch.cached(row)
                self._parked.put(cached, self._decoder.cache.save(row, len(cached)))
        self._drop(rows)
        self._finish(ended)

    def _drop(self, rows: np.ndarray) -> None:
        longest = self._batch.longest
        destinations, sources = self._batch.release(rows)
        if len(sources):
            self._decoder.move(destinations, sources, longest)

    def _finish(self, ended: Sequence[tuple[Request, dict[str, Any]]]) -> None:
        for request, reason in ended:
            request.finish_reason, request.version = reason, self.version
            self._unfinished.discard(request)
        if ended:
            self._on_finish([request for request, _ in ended])

    def _stop(self) -> None:
        self._stopping = True
        if self.failure is None:
            self.abort(lambda _: True)

    # ------------------------------------------------------------------------------------------- commands, by `call`
    def abort(self, matches: Callable[[Request], bool]) -> None:
        """End matching requests; running ones keep their tokens."""
        waiting = [r for r in self._waiting if matches(r)]
        if waiting:
            self._waiting = deque(r for r in self._waiting if not matches(r))
            self._finish([(r, aborted_waiting()) for r in waiting])
        self._leave({row: aborted_running() for row, r in enumerate(self._batch.requests) if matches(r)})

    def pause(self, mode: Literal["abort", "retract", "in_place"]) -> None:
        """Stop stepping. `abort` ends all requests, `retract` sends running ones back to wait, without their cache."""
        self._paused = True
        if mode == "abort":
            self.abort(lambda _: True)
        elif mode == "retract" and len(self._batch):
            retracted = list(self._batch.requests)
            self._drop(np.arange(len(retracted)))
            for request in retracted:
                request.num_retractions += 1
            self._waiting.extendleft(reversed(retracted))

    def resume(self) -> None:
        """Step again."""
        self._paused = False

    @property
    def num_running(self) -> int:
        """Requests whose keys and values are in use."""
        return len(self._batch)

    @property
    def idle(self) -> bool:
        """Whether no request runs, nor waits to run unpaused."""
        return not len(self._batch) and (self._paused or not self._waiting)

    def flush(self) -> bool:
        """Forget all keys and values; False when that is refused because it is not idle."""
        if not self.idle:
            return False
        self._decoder.flush()
        self._parked.clear()
        return True

    def name_weights(self, version: str) -> None:
        """What is drawn from now on is drawn from weights of this name; later requests use no older keys and values."""
        if version == self.version:
            return
        self._parked.clear()
        for row, request in enumerate(self._batch.requests):
            request.version_changes.append((self.version, self._batch.generated(row)))
        for request in self._waiting:
            if len(request.output_ids):
                request.version_changes.append((self.version, len(request.output_ids)))
        self.version = version

    def load(self) -> Load:
        """Counts of this moment."""
        return Load(len(self._batch), len(self._waiting), self._batch.cached_tokens)
