"""What requests for generation may say (SGLang 0.5.23's field names and defaults), and their way into `Request`.

A field of SGLang's that the embedded engine does not implement is accepted at its neutral value and refused at any
other: nothing is silently ignored.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, StrictInt

from .request import Request, Sampling
from .sampler import derive_seed

TokenIds = list[StrictInt]


class BadRequest(ValueError):
    """The client's mistake: answered with status 400 and this message."""


class Body(BaseModel):
    """A request body; an unknown field is refused."""

    model_config = ConfigDict(extra="forbid")


class SamplingParams(Body):
    """SGLang's sampling parameters; null means the default."""

    max_new_tokens: int | None = 128
    temperature: float | None = 1.0
    top_p: float | None = 1.0
    top_k: int | None = -1
    min_p: float | None = 0.0
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = False
    n: int | None = 1
    sampling_seed: int | None = None
    skip_special_tokens: bool | None = True
    # Neutral values only:
    min_new_tokens: Literal[0] | None = 0
    frequency_penalty: Literal[0] | None = 0
    presence_penalty: Literal[0] | None = 0
    repetition_penalty: Literal[1] | None = 1
    stop: None = None
    stop_regex: None = None
    no_stop_trim: bool | None = False
    spaces_between_special_tokens: bool | None = True
    json_schema: None = None
    regex: None = None
    ebnf: None = None
    structural_tag: None = None
    logit_bias: None = None
    beam_width: Literal[1] | None = None
    custom_params: None = None

    def to_sampling(self, limits: Limits, prompt_tokens: int, seed: int) -> Sampling:
        """Check ranges and fill defaults in. Raises BadRequest."""
        temperature = _default(self.temperature, 1.0)
        top_p, top_k, min_p = _default(self.top_p, 1.0), _default(self.top_k, -1), _default(self.min_p, 0.0)
        _require(
            0.0 <= temperature < float("inf"), f"temperature must be a non-negative finite number, got {temperature}."
        )
        _require(0.0 < top_p <= 1.0, f"top_p must be in (0, 1], got {top_p}.")
        _require(0.0 <= min_p <= 1.0, f"min_p must be in [0, 1], got {min_p}.")
        _require(top_k >= 1 or top_k == -1, f"top_k must be -1 (disable) or at least 1, got {top_k}.")
        stop = frozenset(self.stop_token_ids or ()) | limits.eos_token_ids
        if temperature < 1e-6:  # SGLang's bound, below which it is greedy
            temperature, top_k = 0.0, 1
        return Sampling(
            temperature=temperature,
            top_p=top_p,
            top_k=limits.vocab_size if top_k == -1 else min(top_k, limits.vocab_size),
            min_p=min_p,
            max_new_tokens=self._new_tokens(limits, prompt_tokens),
            stop_ids=frozenset() if self.ignore_eos else frozenset(i for i in stop if 0 <= i < limits.vocab_size),
            seed=seed,
        )

    def _new_tokens(self, limits: Limits, prompt_tokens: int) -> int:
        """What was asked for, but two tokens of the context always stay free, as in SGLang."""
        room = limits.context_length - 2 - prompt_tokens
        if self.max_new_tokens is None:
            return room
        _require(self.max_new_tokens >= 0, f"max_new_tokens must be at least 0, got {self.max_new_tokens}.")
        total = prompt_tokens + self.max_new_tokens
        _require(
            total <= limits.context_length,
            f"Requested token count exceeds the model's maximum context length of {limits.context_length} tokens. "
            f"You requested a total of {total} tokens: {prompt_tokens} tokens from the input messages and "
            f"{self.max_new_tokens} tokens for the completion.",
        )
        return min(self.max_new_tokens, room)


@dataclass(frozen=True)
class Limits:
    """What the served model allows."""

    vocab_size: int
    context_length: int
    eos_token_ids: frozenset[int]

    @property
    def prompt_length(self) -> int:
        """A prompt must be shorter than this (SGLang's max_req_input_len)."""
        return self.context_length - 6


class GenerateRequest(Body):
    """Body of POST /generate: one sequence, or a batch when `input_ids` is a list of lists."""

    input_ids: Annotated[TokenIds | list[TokenIds], Field(union_mode="left_to_right")]
    rid: str | list[str] | None = None
    sampling_params: SamplingParams | list[SamplingParams] | None = None
    return_logprob: bool | list[bool] | None = False
    logprob_start_len: int | list[int] | None = -1
    return_routed_experts: bool = False
    """Without effect where the server does not keep them, as in SGLang."""
    routed_experts_start_len: int = 0
    # Neutral values only:
    stream: Literal[False] = False
    text: None = None
    top_logprobs_num: Literal[0] | None = 0
    token_ids_logprob: None = None
    return_text_in_logprobs: Literal[False] | None = False
    return_hidden_states: Literal[False] | None = False
    return_sampling_mask: Literal[False] | None = False
    return_entropy: Literal[False] | None = False
    return_prompt_token_ids: Literal[False] | None = False
    priority: int | None = None
    extra_key: str | list[str] | None = None
    """Without effect: nothing is shared between requests but a sequence that is gone on with, by the same weights."""
    lora_path: None = None
    session_params: None = None

    def to_call(self, limits: Limits, fresh_seed: Callable[[], int]) -> GenerateCall:
        """Check everything and make the sequences: prompt by prompt, each n times. Raises BadRequest."""
        _require(len(self.input_ids) > 0, "input_ids cannot be empty.")
        single = not isinstance(self.input_ids[0], list)
        prompts: list[Any] = [self.input_ids] if single else self.input_ids
        params = _per_prompt(self.sampling_params, len(prompts), "sampling_params", SamplingParams())
        samples = {_default(p.n, 1) for p in params}
        _require(len(samples) == 1, "The parallel_sample_num should be the same for all samples in sample params.")
        n = samples.pop()
        _require(n >= 1, f"n must be at least 1, got {n}.")
        rids = self._rids(len(prompts), n, single)
        wanted = _per_prompt(self.return_logprob, len(prompts), "return_logprob", False)
        starts = _per_prompt(self.logprob_start_len, len(prompts), "logprob_start_len", -1)
        call = GenerateCall([], [], [], as_list=not single or n > 1)
        for index, ids in enumerate(prompts):
            prompt, param = _prompt(ids, limits), params[index]
            start = _log_prob_start(wanted[index], starts[index], len(prompt))
            seed = _seed(param.sampling_seed, fresh_seed)
            for k in range(n):
                sampling = param.to_sampling(limits, len(prompt), derive_seed(seed, k))
                call.requests.append(Request(rids[index * n + k], prompt, sampling, start, self._routed_from(prompt)))
                call.return_log_probs.append(wanted[index])
                call.skip_special_tokens.append(_default(param.skip_special_tokens, True))
        return call

    def _routed_from(self, prompt: np.ndarray) -> int | None:
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

    def _rids(self, prompts: int, n: int, single: bool) -> list[str]:
        """One id per sequence. An id given for several begins all of theirs, so that aborting it aborts them."""
        if self.rid is None:
            return [uuid.uuid4().hex for _ in range(prompts * n)]
        if isinstance(self.rid, str):
            return [self.rid] if single and n == 1 else [f"{self.rid}_{i}" for i in range(prompts * n)]
        _require(
            len(self.rid) == prompts,
            "The specified rids length mismatch with the batch_size for batch processing.",
        )
        duplicates = [rid for rid, count in Counter(self.rid).items() if count > 1]
        _require(not duplicates, f"Duplicate request IDs detected within the request: {duplicates}")
        return [rid if n == 1 else f"{rid}_{k}" for rid in self.rid for k in range(n)]


@dataclass
class GenerateCall:
    """The sequences of one /generate, and how they are to be answered; all lists have one entry per sequence."""

    requests: list[Request]
    return_log_probs: list[bool]
    skip_special_tokens: list[bool]
    as_list: bool
    abandoned: bool = False
    """The client has gone."""


class AbortRequest(Body):
    """Body of POST /abort_request."""

    rid: str | None = None
    abort_all: bool = False
    abort_message: str | None = None


class PauseRequest(Body):
    """Body of POST /pause_generation."""

    mode: Literal["abort", "retract", "in_place"] = "abort"


class ContinueRequest(Body):
    """Body of POST /continue_generation."""

    torch_empty_cache: bool = True


def _default(value: Any, default: Any) -> Any:
    return default if value is None else value


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise BadRequest(message)


def _per_prompt(value: Any, count: int, name: str, default: Any) -> list[Any]:
    if not isinstance(value, list):
        return [_default(value, default)] * count
    _require(len(value) == count, f"{name} has {len(value)} entries for {count} sequences of input_ids.")
    return value


def _prompt(ids: list[int], limits: Limits) -> np.ndarray:
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
    _require(
        len(prompt) < limits.prompt_length,
        f"Input length ({len(prompt)} tokens) exceeds the maximum allowed length ({limits.prompt_length} tokens). "
        "Use a shorter input.",
    )
    return prompt


def _log_prob_start(wanted: bool, start: int, prompt_tokens: int) -> int | None:
    if not wanted or start == -1:
        return None
    _require(
        0 <= start < prompt_tokens,
        f"logprob_start_len must be -1 (none of the prompt) or in [0, {prompt_tokens}), got {start}.",
    )
    return start


def _seed(seed: int | None, fresh_seed: Callable[[], int]) -> int:
    if seed is None:
        return fresh_seed()
    _require(-(2**63) <= seed < 2**63, f"sampling_seed must be in [-2**63, 2**63 - 1], got {seed}.")
    return seed
