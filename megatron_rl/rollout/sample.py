"""The record that travels: `Sample` (one response) and `Group` (the samples of one prompt), with their invariants.

No HTTP, scheduling or scoring here. Per-token arrays of a sample cover the RESPONSE and have equal lengths at all
times, because only `append` makes them longer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_rl.algorithms.dynamic import is_informative
from megatron_rl.routes import RoutePart

Tokens = NDArray[np.int64]
LogProbs = NDArray[np.float32]
Mask = NDArray[np.bool_]

GROUP_DIGITS, SAMPLE_DIGITS, ATTEMPT_DIGITS = 9, 3, 4

ENVIRONMENT_FAILED = "environment"
"""finish_reason of a sample whose environment failed: nothing can be said of it."""


class Span(NamedTuple):
    """Response tokens [start, end) were sampled by weights `version`."""

    version: int
    start: int
    end: int


def group_name(group_id: int, kind: str = "s") -> str:
    """Common beginning of the ids of one group, `s000001234-`. Engines do not know it; they abort whole ids.

    `kind` is one letter: s for training samples, e for evaluation.
    """
    return f"{kind}{group_id:0{GROUP_DIGITS}d}-"


def sample_name(group_id: int, index: int, kind: str = "s") -> str:
    """`s000001234-003.`: fixed width with a terminator, so that no id is a prefix of another."""
    return f"{group_name(group_id, kind)}{index:0{SAMPLE_DIGITS}d}."


def group_of(sample_id: str) -> str:
    """The group's name, with which the sample's id begins."""
    return sample_id[: -1 - SAMPLE_DIGITS]


def sampling_seed(run_seed: int, group_id: int, index: int, kind: str = "s") -> int:
    """Seed of one sample in [0, 2^31): the same in every process and every run with the same seed."""
    digest = hashlib.blake2b(f"{kind}/{run_seed}/{group_id}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 33


@dataclass(eq=False)
class Sample:
    """One response: its tokens, the log-probs and weights that sampled them, and what it earned.

    prompt_tokens int64 [P]; response_tokens int64 [R]; log_probs float32 [R], of the engine at `temperature`; loss_mask
    bool [R]; spans cover [0, R) without gaps. Rewards are NaN until `score`. `attempts`: requests sent for it so far.
    Tokens of an environment between two turns belong to the response: loss_mask False and log_probs 0 there, and
    [start, end) of them in `observations`. environment_reward is None until a conversation with one is over. `routes`:
    where the routes of the tokens [0, routed) of prompt and response lie, in order and without gaps.
    """

    id: str
    group_id: int
    prompt_tokens: Tokens
    temperature: float
    seed: int
    response_tokens: Tokens = field(default_factory=lambda: np.empty(0, np.int64))
    log_probs: LogProbs = field(default_factory=lambda: np.empty(0, np.float32))
    loss_mask: Mask = field(default_factory=lambda: np.empty(0, np.bool_))
    spans: list[Span] = field(default_factory=list)
    finish_reason: str | None = None
    text: str = ""
    observations: list[tuple[int, int]] = field(default_factory=list)
    environment_reward: float | None = None
    correctness: float = float("nan")
    components: dict[str, float] = field(default_factory=dict)
    reward: float = float("nan")
    attempts: int = 0
    routes: list[RoutePart] = field(default_factory=list)

    def next_request(self) -> str:
        """`s000001234-003.0007`, a name that no other request for this sample has had.

        So a late answer or abort never meets a later request. Raises ValueError when there are no names left.
        """
        if self.attempts >= 10**ATTEMPT_DIGITS:
            raise ValueError(
                f"{self.id}: request {self.attempts} for one response does not fit {ATTEMPT_DIGITS} digits; "
                "raise rollout.segment_tokens"
            )
        self.attempts += 1
        return f"{self.id}{self.attempts - 1:0{ATTEMPT_DIGITS}d}"

    def append(
        self,
        tokens: Sequence[int] | Tokens,
        log_probs: Sequence[float] | LogProbs,
        spans: list[Span],
        routes: RoutePart | None = None,
    ) -> None:
        """Add generated tokens. `spans` count from the first ADDED token and must cover all of them in order.

        `routes` are of the tokens from `routed` to the last but one, whose successor is the last token added.

        Raises:
            ValueError: it is finished, lengths differ, spans or routes leave a gap, or a log-prob is not finite.
        """
        new = np.asarray(tokens, np.int64)
        new_log_probs = np.asarray(log_probs, np.float32)
        if self.finished:
            raise ValueError(f"sample {self.id} is finished ({self.finish_reason}); nothing can be appended")
        if new.shape != new_log_probs.shape or new.ndim != 1:
            raise ValueError(f"sample {self.id}: {new.shape} tokens but {new_log_probs.shape} log-probs")
        if not np.isfinite(new_log_probs).all():
            raise ValueError(f"sample {self.id}: a log-prob is not finite")
        bounds = [0, *(s.end for s in spans)]
        if [s.start for s in spans] != bounds[:-1] or bounds[-1] != len(new) or any(s.start >= s.end for s in spans):
            raise ValueError(f"sample {self.id}: version spans {spans} do not cover {len(new)} tokens in order")
        if routes is not None:
            self._add_routes(routes, self.prompt_length + self.response_length + len(new) - 1)
        offset = self.response_length
        self.response_tokens = _joined(self.response_tokens, new)
        self.log_probs = _joined(self.log_probs, new_log_probs)
        self.loss_mask = _joined(self.loss_mask, np.ones(len(new), np.bool_))
        for span in spans:
            self._extend_spans(Span(span.version, offset + span.start, offset + span.end))

    def append_observation(self, tokens: Sequence[int] | Tokens) -> None:
        """Add what an environment said: not sampled, so outside of the loss; it counts as the newest weights' version.

        Raises:
            ValueError: the sample is finished, nothing was sampled yet, or there are no tokens.
        """
        if not self.spans or not len(tokens):
            raise ValueError(f"sample {self.id}: an observation has tokens, and follows sampled ones")
        count = len(tokens)
        self.append(tokens, np.zeros(count, np.float32), [Span(self.version_last, 0, count)])
        self.loss_mask[-count:] = False
        self.observations.append((self.response_length - count, self.response_length))

    def _add_routes(self, part: RoutePart, end: int) -> None:
        if (part.first, part.end) != (self.routed, end):
            raise ValueError(
                f"sample {self.id}: routes of the tokens [{part.first}, {part.end}) where those of [{self.routed}, "
                f"{end}) are missing"
            )
        self.routes.append(part)

    def _extend_spans(self, span: Span) -> None:
        if self.spans and self.spans[-1].version == span.version:
            self.spans[-1] = self.spans[-1]._replace(end=span.end)
        else:
            self.spans.append(span)

    def finish(self, reason: str) -> None:
        """No token follows. `reason` is the engine's (stop, length or abort), or ENVIRONMENT_FAILED."""
        self.finish_reason = reason

    def reopen(self) -> None:
        """Another turn follows."""
        self.finish_reason = None

    def score(self, reward: float, correctness: float, components: dict[str, float]) -> None:
        """Set what the verifiers said; NaN means that they could not tell."""
        self.reward, self.correctness, self.components = float(reward), float(correctness), dict(components)

    def exclude(self) -> None:
        """Take all tokens out of the loss; rewards stay for the statistics of the group."""
        self.loss_mask = np.zeros(self.response_length, np.bool_)

    @property
    def finished(self) -> bool:
        """Whether the engine ended the response."""
        return self.finish_reason is not None

    @property
    def truncated(self) -> bool:
        """Whether the response was cut at its token limit."""
        return self.finish_reason == "length"

    @property
    def valid(self) -> bool:
        """Whether the total reward is a number; other samples take no part in training."""
        return bool(np.isfinite(self.reward))

    @property
    def prompt_length(self) -> int:
        """Prompt tokens."""
        return len(self.prompt_tokens)

    @property
    def response_length(self) -> int:
        """Response tokens."""
        return len(self.response_tokens)

    @property
    def trainable_tokens(self) -> int:
        """Response tokens in the loss."""
        return int(np.count_nonzero(self.loss_mask))

    @property
    def routed(self) -> int:
        """Tokens of prompt and response, counted together, whose routes are known; the last token never has one."""
        return self.routes[-1].end if self.routes else 0

    @property
    def turns(self) -> list[tuple[int, int]]:
        """Where the model's turns [start, end) lie in the response; the last one may still grow."""
        starts = [0, *(end for _, end in self.observations)]
        ends = [*(start for start, _ in self.observations), self.response_length]
        return [(start, end) for start, end in zip(starts, ends, strict=True) if start < end]

    @property
    def sampled(self) -> Mask:
        """bool [R], False on tokens of an environment, whatever the loss mask says."""
        mask = np.ones(self.response_length, np.bool_)
        for start, end in self.observations:
            mask[start:end] = False
        return mask

    @property
    def version_first(self) -> int:
        """Oldest weights that sampled a token; -1 without tokens."""
        return min((s.version for s in self.spans), default=-1)

    @property
    def version_last(self) -> int:
        """Newest weights that sampled a token; -1 without tokens."""
        return max((s.version for s in self.spans), default=-1)


def _joined(old: NDArray[Any], new: NDArray[Any]) -> NDArray[Any]:
    return np.concatenate([old, new]) if len(old) else new


@dataclass(eq=False)
class Group:
    """The samples of one prompt, started with weights `version`. `id` is the number of the prompt's draw in the run."""

    id: int
    prompt_id: str
    version: int
    samples: list[Sample]

    @classmethod
    def start(
        cls,
        group_id: int,
        prompt_id: str,
        prompt_tokens: Tokens,
        size: int,
        *,
        run_seed: int,
        version: int,
        temperature: float,
        kind: str = "s",
    ) -> Group:
        """`size` empty samples with their ids and seeds, sharing one read-only prompt array."""
        prompt = np.array(prompt_tokens, np.int64)
        prompt.flags.writeable = False
        samples = [
            Sample(
                id=sample_name(group_id, k, kind),
                group_id=group_id,
                prompt_tokens=prompt,
                temperature=temperature,
                seed=sampling_seed(run_seed, group_id, k, kind),
            )
            for k in range(size)
        ]
        return cls(group_id, prompt_id, version, samples)

    @property
    def unfinished(self) -> list[Sample]:
        """Samples whose responses have not ended."""
        return [s for s in self.samples if not s.finished]

    @property
    def finished(self) -> bool:
        """Whether all responses have ended; looks no further than the first that has not."""
        return all(s.finished for s in self.samples)

    @property
    def informative(self) -> bool:
        """Whether raw correctness varies, see `algorithms.dynamic.is_informative`."""
        return is_informative(s.correctness for s in self.samples)

    @property
    def pass_rate(self) -> float:
        """Mean raw correctness of the samples that could be judged; NaN without any."""
        known = [s.correctness for s in self.samples if np.isfinite(s.correctness)]
        return float(np.mean(known)) if known else float("nan")

    @property
    def version_first(self) -> int:
        """Oldest weights in the group."""
        return min((s.version_first for s in self.samples if s.spans), default=self.version)
