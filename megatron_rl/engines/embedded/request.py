"""One sequence on its way through the engine; what HTTP sends and answers is in `protocol` and `responses`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int64]
LogProbs = NDArray[np.float32]


@dataclass(frozen=True)
class Sampling:
    """How the tokens of one sequence are drawn. `temperature` 0 is greedy; `top_k` is between 1 and the vocabulary.

    `stop_ids` holds every id that ends the sequence, the model's own included; empty with ignore_eos.
    """

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    max_new_tokens: int
    stop_ids: frozenset[int]
    seed: int
    """Of 64 bits."""


@dataclass(frozen=True)
class VersionSpan:
    """Output tokens [start, end) were drawn from the weights called `version`."""

    version: str
    start: int
    end: int


@dataclass(eq=False)
class Request:
    """waiting -> running -> finished, with running -> waiting when it is retracted. Only the scheduler thread writes.

    `output_ids` int64 [R] and `log_probs` float32 [R] are complete when the request waits or has finished; while it
    runs they live in the batch.
    """

    rid: str
    prompt: Tokens
    sampling: Sampling
    scored: bool = False
    """Log-probs of the prompt are wanted."""
    routed_from: int | None = None
    """First token whose experts are wanted; None = none."""

    output_ids: Tokens = field(default_factory=lambda: np.empty(0, np.int64))
    log_probs: LogProbs = field(default_factory=lambda: np.empty(0, np.float32))
    input_log_probs: LogProbs | None = None
    """float32 [P - 1], of all prompt tokens but the first, at temperature 1."""
    routed_experts: NDArray[np.int32] | None = None
    """[T - 1 - from, layers, top_k] of the tokens that were read, all but the last; set when it ends."""
    cached_tokens: int = 0
    """Prompt tokens whose keys and values came from another request's."""
    num_retractions: int = 0
    version_changes: list[tuple[str, int]] = field(default_factory=list)
    """(version in force until then, output tokens by then), oldest first."""
    version: str = ""
    """Version in force at the end."""
    finish_reason: dict[str, Any] | None = None
    prefilled: bool = False
    """Its prompt has been computed at least once."""

    @property
    def tokens(self) -> Tokens:
        """Prompt and what has been generated so far: what a (re-)prefill computes."""
        return np.concatenate((self.prompt, self.output_ids)) if len(self.output_ids) else self.prompt

    @property
    def final_length(self) -> int:
        """Most tokens that this sequence can have."""
        return len(self.prompt) + self.sampling.max_new_tokens

    def version_spans(self) -> list[VersionSpan]:
        """Adjacent half-open spans that cover the output tokens; one empty span when there are none."""
        spans: list[VersionSpan] = []
        for version, end in (*self.version_changes, (self.version, len(self.output_ids))):
            start = spans[-1].end if spans else 0
            if spans and end <= start:
                continue
            if spans and spans[-1].version == version:
                spans[-1] = VersionSpan(version, spans[-1].start, end)
            else:
                spans.append(VersionSpan(version, start, end))
        return spans


def stopped(token: int) -> dict[str, Any]:
    """Finish reason: a stop id was drawn (it is part of the output)."""
    return {"type": "stop", "matched": token}


def out_of_length(length: int) -> dict[str, Any]:
    """Finish reason: max_new_tokens were drawn."""
    return {"type": "length", "length": length}


def aborted_running() -> dict[str, Any]:
    """Finish reason: aborted while it was decoded; the tokens so far are kept."""
    return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}


def aborted_waiting() -> dict[str, Any]:
    """Finish reason: aborted before it ran, or after it was retracted."""
    return {"type": "abort", "message": "Abort in waiting queue"}


def failed(message: str) -> dict[str, Any]:
    """Finish reason: the engine could not go on; answered with HTTP 500."""
    return {"type": "abort", "message": message, "status_code": 500, "err_type": "InternalServerError"}
