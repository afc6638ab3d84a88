"""What requests for generation may say, in SGLang 0.5.23's field names, and their way into `Request`.

Any field that is not known here is refused: nothing is silently ignored.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, StrictInt

from .request import Request, Sampling, Tokens
from .sampler import derive_seed

TokenIds = list[StrictInt]


class BadRequest(ValueError):
    """The client's mistake: answered with status 400 and this message."""


class Body(BaseModel):
    """A request body; an unknown field is refused."""

    model_config = ConfigDict(extra="forbid")


class SamplingParams(Body):
    """SGLang's sampling parameters, with its defaults."""

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    sampling_seed: int | None = None

    def to_sampling(self, limits: Limits, prompt_tokens: int, fresh_seed: Callable[[], int]) -> Sampling:
        """Check ranges and put the model's own values in. Raises BadRequest."""
        temperature, top_p, top_k, min_p = self.temperature, self.top_p, self.top_k, self.min_p
        seed = fresh_seed() if self.sampling_seed is None else self.sampling_seed
        _require(
            0.0 <= temperature < float("inf"), f"temperature must be a non-negative finite number, got {temperature}."
        )
        _require(0.0 < top_p <= 1.0, f"top_p must be in (0, 1], got {top_p}.")
        _require(0.0 <= min_p <= 1.0, f"min_p must be in [0, 1], got {min_p}.")
        _require(top_k >= 1 or top_k == -1, f"top_k must be -1 (disable) or at least 1, got {top_k}.")
        _require(-(2**63) <= seed < 2**63, f"sampling_seed must be in [-2**63, 2**63 - 1], got {seed}.")
        stop = limits.eos_token_ids.union(self.stop_token_ids)
        if temperature < 1e-6:  # SGLang's bound, below which it is greedy
            temperature, top_k = 0.0, 1
        return Sampling(
            temperature=temperature,
            top_p=top_p,
            top_k=limits.vocab_size if top_k == -1 else min(top_k, limits.vocab_size),
            min_p=min_p,
            max_new_tokens=self._new_tokens(limits, prompt_tokens),
            stop_ids=frozenset() if self.ignore_eos else frozenset(i for i in stop if 0 <= i < limits.vocab_size),
            seed=seed % 2**64,
        )

    def _new_tokens(self, limits: Limits, prompt_tokens: int) -> int:
        """What was asked for, but two tokens of the context always stay free, as in SGLang."""
        _require(self.max_new_tokens >= 0, f"max_new_tokens must be at least 0, got {self.max_new_tokens}.")
        total = prompt_tokens + self.max_new_tokens
        _require(
            total <= limits.context_length,
            f"Requested token count exceeds the model's maximum context length of {limits.context_length} tokens. "
            f"You requested a total of {total} tokens: {prompt_tokens} tokens from the input messages and "
            f"{self.max_new_tokens} tokens for the completion.",
        )
        return min(self.max_new_tokens, limits.context_length - 2 - prompt_tokens)


@dataclass(frozen=True)
class Limits:
    """What the served model allows."""

    vocab_size: int
    context_length: int
    eos_token_ids: frozenset[int]


class GenerateRequest(Body):
    """Body of POST /generate: one sequence, or a batch when `input_ids` is a list of lists."""

    input_ids: Annotated[TokenIds | list[TokenIds], Field(union_mode="left_to_right")]
    rid: str | list[str] | None = None
    sampling_params: SamplingParams | list[SamplingParams] = SamplingParams()
    return_logprob: bool = False
    logprob_start_len: Literal[-1, 0] = -1
    """0: log-probs of the prompt as well."""
    return_routed_experts: bool = False
    """Without effect where the server does not keep them, as in SGLang."""
    routed_experts_start_len: int = 0
    extra_key: str | list[str] | None = None
    """Without effect: nothing is shared between requests but a sequence that is gone on with, by the same weights."""

    def to_call(self, limits: Limits, fresh_seed: Callable[[], int]) -> GenerateCall:
        """Check everything and make the sequences: prompt by prompt, each n times. Raises BadRequest."""
        _require(len(self.input_ids) > 0, "input_ids cannot be empty.")
        single = not isinstance(self.input_ids[0], list)
        ids: list[Any] = [self.input_ids] if single else self.input_ids
        params = self.sampling_params if isinstance(self.sampling_params, list) else [self.sampling_params] * len(ids)
        _require(
            len(params) == len(ids),
            f"sampling_params has {len(params)} entries for {len(ids)} sequences of input_ids.",
        )
        samples = {param.n for param in params}
        _require(len(samples) == 1, "The parallel_sample_num should be the same for all samples in sample params.")
        n = samples.pop()
        _require(n >= 1, f"n must be at least 1, got {n}.")
        scored = self.return_logprob and self.logprob_start_len == 0
        requests = []
        for rid, one, param in zip(self._rids(len(ids)), ids, params, strict=True):
            prompt = _prompt(one, limits)
            first = param.to_sampling(limits, len(prompt), fresh_seed)
            for k in range(n):
                name, sampling = rid if n == 1 else f"{rid}_{k}", replace(first, seed=derive_seed(first.seed, k))
                requests.append(Request(name, prompt, sampling, scored, self._routed_from(prompt)))
        return GenerateCall(requests, self.return_logprob, as_list=not single or n > 1)

    def _routed_from(self, prompt: Tokens) -> int | None:
        if not self.return_routed_experts:
            return None
        start = self.routed_experts_start_len
        _require(start >= 0, f"routed_experts_start_len={start} is lower than 0. Please use a non-negative one.")
        _require(
            start <= len(prompt),
            f"routed_experts_start_len={start} is higher than the number of input tokens {len(prompt)}. Please use a "
            "smaller one.",
        )
        return start

    def _rids(self, prompts: int) -> list[str]:
        """One id for each prompt; with n above 1 it begins those of its samples."""
        if self.rid is None:
            return [uuid.uuid4().hex for _ in range(prompts)]
        rids = [self.rid] if isinstance(self.rid, str) else self.rid
        _require(len(rids) == prompts, "The specified rids length mismatch with the batch_size for batch processing.")
        duplicates = [rid for rid, count in Counter(rids).items() if count > 1]
        _require(not duplicates, f"Duplicate request IDs detected within the request: {duplicates}")
        return rids


@dataclass
class GenerateCall:
    """The sequences of one /generate, and how they are to be answered."""

    requests: list[Request]
    return_log_probs: bool
    as_list: bool
    abandoned: bool = False
    """The client has gone."""


class AbortRequest(Body):
    """Body of POST /abort_request."""

    rid: str | None = None
    abort_all: bool = False


class PauseRequest(Body):
    """Body of POST /pause_generation."""

    mode: Literal["abort", "retract", "in_place"] = "abort"


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise BadRequest(message)


def _prompt(ids: list[int], limits: Limits) -> Tokens:
    _require(len(ids) > 0, "input_ids cannot be empty.")
    try:
        prompt = np.array(ids, np.int64)
    except OverflowError:
        raise BadRequest("input_ids contains a number beyond 64 bits.") from None
    outside = prompt[(prompt < 0) | (prompt >= limits.vocab_size)]
    _require(
        len(outside) == 0,
        f"input_ids contains out-of-vocabulary token id {outside[0] if len(outside) else ''}; "
        f"valid range is [0, {limits.vocab_size}).",
    )
    _require(
        len(prompt) < limits.context_length,
        f"The input ({len(prompt)} tokens) is longer than the model's context length ({limits.context_length} tokens).",
    )
    longest = limits.context_length - 6  # SGLang's max_req_input_len, which a prompt may not reach
    _require(
        len(prompt) < longest,
        f"Input length ({len(prompt)} tokens) exceeds the maximum allowed length ({longest} tokens). "
        "Use a shorter input.",
    )
    return prompt
