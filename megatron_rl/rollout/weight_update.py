"""The steps of one weight update as engines see it; a replica that fails one is left out of those that follow.

    pause -> flush -> [begin] -> weights -> [version -> end] -> checksums -> continue -> version -> log-probs

What is in brackets belongs to weights that come as tensors; an update from disk names the version itself. How the
weights travel, and what becomes of a replica that failed, is not known here. Blocking code, for one process.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from .fanout import FanOut, Pending, Replies
from .protocol import EngineError, TransportError, version_of
from .sample import LogProbs

log = logging.getLogger(__name__)
FLUSH_ATTEMPTS, FLUSH_PAUSE_S = 50, 0.1
CONTROL_TIMEOUT_S = 60.0
"""Deadline of one control call that moves no weights: a replica that hangs costs the others no more than this."""
PROBE_TIMEOUT_S = 10.0
"""A probe may stand behind all requests that the pause has sent back to wait. The trainer does not wait for those: the
answer is judged before the next update (`late_probe`)."""
LATE_PROBE_S = 24 * 3600.0
DISOWN_TIMEOUT_S = 10.0
NO_VERSION = "-1"
"""The label of weights that are not those of any version."""

Checksums = list[dict[str, str]]
"""Of one replica: for each tensor-parallel rank, parameter name -> checksum."""


class WeightUpdate:
    """One update to `version`. `left`: the replicas that have failed nothing so far, `failed`: why the others are out.

    Args:
        calls: HTTP to the replicas.
        urls: whom to update.
        version: the label of the new weights.
        deadline: of the whole update, on the clock of `time.monotonic`.
        interrupted: whether the run is to end; every wait then raises `Interrupted`.
    """

    def __init__(
        self,
        calls: FanOut,
        urls: Sequence[str],
        version: int,
        *,
        deadline: float,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> None:
        self.version, self.left = version, list(urls)
        self.failed: dict[str, EngineError] = {}
        self.checksums: dict[str, Checksums] = {}
        self.overall: str | None = None
        self._calls, self._deadline, self._interrupted = calls, deadline, interrupted
        self._named: set[str] = set()
        self._probing: Callable[[Replies], dict[str, EngineError]] = lambda replies: {}
        self._probes = Pending({})
        self.unprobed: list[str] = []
        """Replicas that have not answered the probe yet."""

    def leave_out(self, reasons: Mapping[str, str]) -> None:
        """These replicas did not get the weights."""
        self._drop({url: EngineError(reason) for url, reason in reasons.items()})

    # ------------------------------------------------------------------------------------------------------- steps

    def pause(self, mode: str) -> None:
        """Stop decoding and forget all keys and values; with `in_place` only where no request keeps its own."""
        self._post("/pause_generation", {"mode": mode})
        if mode == "in_place":
            self._call("/flush_cache", {}, self.left)  # refused while requests run: they keep theirs, see `cache_key`
        else:
            self._flush()

    def begin(self) -> None:
        """Open the session that updates by tensors need; one that an update has left open is closed first."""
        stuck = self._call("/begin_weight_update", {"selector": "all"}, self.left)
        again = [url for url, error in stuck.failures.items() if "already open" in str(error)]
        self._drop({url: error for url, error in stuck.failures.items() if url not in again}, "begin_weight_update")
        if again:
            self._call("/end_weight_update", {}, again)
            replies = self._call("/begin_weight_update", {"selector": "all"}, again)
            self._drop(replies.failures, "begin_weight_update")

    def close_old_session(self) -> None:
        """End a session that a failed update may have left open; where there is none, nothing happens."""
        self._call("/end_weight_update", {}, self.left)

    def load_from_disk(self, path: str | Path, paths: Mapping[str, str], *, flush: bool) -> None:
        """Load a Hugging Face directory as `version`; `paths` gives another one for some replicas."""
        shared = {"flush_cache": flush, "abort_all_requests": False, "weight_version": str(self.version)}
        bodies = {url: {"model_path": paths.get(url, str(path)), **shared} for url in self.left}
        self._named |= self._step("/update_weights_from_disk", bodies, self._remaining()).keys()

    def end(self) -> None:
        """Name the weights that came as tensors, and close the session."""
        body = {"new_version": str(self.version), "abort_all_requests": False}
        self._named |= self._post("/update_weight_version", body).keys()
        self._post("/end_weight_update", {}, self._remaining())

    def compare(self, reference: Mapping[int, Checksums] | None = None) -> None:
        """Replicas with as many tensor-parallel ranks must hold the same bytes, and those of `reference`, by ranks."""
        answers = self._post("/weights_checker", {"action": "checksum"}, self._remaining())
        for url, answer in answers.items():
            try:
                self.checksums[url] = read_checksums(url, answer)
            except EngineError as error:
                self._drop({url: error}, "weights_checker")
        held = {url: self.checksums[url] for url in self.left}
        self._drop(disagreements(held, reference or {}), "weights_checker")
        told = {answers[url].get("per_engine_checksum") for url in self.left}
        self.overall = told.pop() if len(told) == 1 else None  # engines of several sizes may tell several

    def resume(self) -> None:
        """Decode again; each replica must then report the version."""
        self._post("/continue_generation", {})
        timeout_s = min(CONTROL_TIMEOUT_S, self._remaining())
        replies = self._wait(self._calls.get("/model_info", self.left, timeout_s))
        self._drop(replies.failures, "model_info")
        found = {u: a.get("weight_version") if isinstance(a, dict) else a for u, a in replies.answers.items()}
        wrong = {
            url: EngineError(f"engine {url}: reports weight_version {label!r} after the update to {self.version}")
            for url, label in found.items()
            if version_of(label) != self.version
        }
        self._drop(wrong, "model_info")

    def probe(self, tokens: Sequence[int], expected: LogProbs, tolerance: float) -> None:
        """The log-probs of a short text must be those of the trainer.

        A replica that is too busy to say them keeps the weights, whose checksums were right, until `late_probe`.

        Args:
            tokens: the text, at least two tokens.
            expected: float32 [len(tokens) - 1], the trainer's log-probs of all but the first token.
            tolerance: largest difference of one token, nats.
        """
        body = {
            "input_ids": list(tokens),
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0, "ignore_eos": True},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        self._probes = self._calls.post("/generate", dict.fromkeys(self.left, body), LATE_PROBE_S)
        self._probing = partial(wrong_answers, expected, tolerance)
        replies = self._probes.result_within(min(PROBE_TIMEOUT_S, self._remaining()), self._interrupted)
        self.unprobed = [url for url in self.left if url not in replies.answers and url not in replies.failures]
        if self.unprobed:
            busy = ", ".join(self.unprobed)
            log.info("weights %d: too busy for the probe of log-probs, which is judged later: %s", self.version, busy)
        self._drop(replies.failures, "generate")
        self._drop(self._probing(replies), "generate")

    def late_probe(self) -> dict[str, EngineError]:
        """Before the next update: why replicas that answered late do not hold these weights, after all.

        Those that have not answered by now stay in `unprobed`; what they say is of no interest any more.
        """
        answers = {url: a for url, a in self._probes.so_far().answers.items() if url in self.unprobed}
        self._probes.cancel()
        self.unprobed = [url for url in self.unprobed if url not in answers]
        wrong = self._probing(Replies(answers))
        self._drop(wrong, "generate")
        return {url: self.failed[url] for url in wrong}

    def disown(self) -> None:
        """Take the label off replicas that got it and then failed, so that nobody believes it. Never raises."""
        named = [url for url in self.failed if url in self._named]
        body = {"new_version": NO_VERSION, "abort_all_requests": False}
        calls = self._calls.post("/update_weight_version", dict.fromkeys(named, body), DISOWN_TIMEOUT_S)
        calls.result_unless(self._interrupted)

    # ------------------------------------------------------------------------------------------------------- parts

    def _flush(self) -> None:
        """Requests may still be leaving: try for a few seconds."""
        waiting, last = list(self.left), Replies()
        for _ in range(FLUSH_ATTEMPTS):
            last = self._call("/flush_cache", {}, waiting)
            waiting = [url for url, error in last.failures.items() if not isinstance(error, TransportError)]
            self._drop({url: e for url, e in last.failures.items() if url not in waiting}, "flush_cache")
            if not waiting:
                return
            time.sleep(FLUSH_PAUSE_S)
        self._drop(last.failures, "flush_cache")

    def _post(self, path: str, body: Any, timeout_s: float | None = None) -> dict[str, Any]:
        return self._step(path, dict.fromkeys(self.left, body), timeout_s or CONTROL_TIMEOUT_S)

    def _step(self, path: str, bodies: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """The answers of those that took the step."""
        replies = self._wait(self._calls.post(path, bodies, min(timeout_s, self._remaining())))
        self._drop(replies.failures, path.removeprefix("/"))
        return replies.answers

    def _call(self, path: str, body: Any, urls: Sequence[str]) -> Replies:
        timeout_s = min(CONTROL_TIMEOUT_S, self._remaining())
        return self._wait(self._calls.post(path, dict.fromkeys(urls, body), timeout_s))

    def _wait(self, pending: Pending) -> Replies:
        return pending.result(self._interrupted)

    def _remaining(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def _drop(self, failures: Mapping[str, EngineError], step: str | None = None) -> None:
        for url, error in failures.items():
            kind = TransportError if isinstance(error, TransportError) else EngineError
            said = f"step {step} failed: {error}" if step else str(error)
            self.failed[url] = kind(f"weight update to version {self.version}: {said}")
            log.warning("%s", self.failed[url])
        self.left = [url for url in self.left if url not in failures]


def read_checksums(url: str, answer: Any) -> Checksums:
    """What /weights_checker says. Raises EngineError when it says something else."""
    try:
        return [rank["checksums"] for rank in answer["ranks"]]
    except (KeyError, TypeError) as error:
        raise EngineError(f"engine {url}: the answer has no ranks[].checksums ({error!r})") from error


def wrong_answers(expected: LogProbs, tolerance: float, replies: Replies) -> dict[str, EngineError]:
    """Of a probe: replicas that say no log-probs, or some further than `tolerance` from the trainer's."""
    wrong = {}
    for url, answer in replies.answers.items():
        try:
            entries = answer["meta_info"]["input_token_logprobs"]
            log_probs = np.array([entry[0] for entry in entries[1:]], np.float32)
            if log_probs.shape != expected.shape:
                raise ValueError(f"{len(entries)} entries")
        except (KeyError, TypeError, ValueError, IndexError) as error:
            wrong[url] = EngineError(
                f"engine {url}: no log-prob for each of the {len(expected) + 1} tokens of the probe ({error!r})"
            )
            continue
        distance = np.abs(log_probs - expected)
        if not distance.max() <= tolerance:  # NaN is wrong, too
            place = int(distance.argmax())
            wrong[url] = EngineError(
                f"engine {url}: the log-prob of token {place + 1} of the probe is {log_probs[place]:.4g}, the "
                f"trainer's is {expected[place]:.4g}, further than engine.probe_tolerance={tolerance:g}; do "
                "engine.dtype, model and the names of all tensors fit?"
            )
    return wrong


def disagreements(held: Mapping[str, Checksums], reference: Mapping[int, Checksums]) -> dict[str, EngineError]:
    """Replicas whose checksums are not those of `reference`, or of the majority where it says nothing of their size.

    Without a majority nobody knows who is right, and all of that size are wrong.
    """
    wrong: dict[str, EngineError] = {}
    for size in sorted({len(ranks) for ranks in held.values()}):
        urls = [url for url, ranks in held.items() if len(ranks) == size]
        good = reference.get(size)
        if good is None:
            best = max(urls, key=lambda url: sum(held[url] == held[other] for other in urls))
            good = held[best]
        agree = [url for url in urls if held[url] == good]
        others = [url for url in urls if url not in agree]
        for url in others:
            pair = f"engines {agree[0]} and {url} differ" if agree else f"engine {url} differs from the others"
            wrong[url] = EngineError(f"{pair} in {_difference(held[url], good)}")
        if size not in reference and others and 2 * len(agree) <= len(urls):
            wrong |= dict.fromkeys(agree, wrong[others[0]])
    return wrong


def _difference(mine: Checksums, theirs: Checksums) -> str:
    for rank, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        names = [name for name in sorted(a.keys() | b.keys()) if a.get(name) != b.get(name)]
        if names:
            return f"{len(names)} parameters of rank {rank}, first {names[0]}; do both read the same directory?"
    return "nothing"
