"""SGLang's `/generate` in plain data: what is asked and answered, its errors, and the request. No HTTP here.

Answers are read in `answers.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import orjson

from megatron_rl.routes import RoutePart
from megatron_rl.routes.store import Rows

from .sample import LogProbs, Sample, Span, Tokens

INITIAL_VERSION = "default"
"""What SGLang calls the weights that it was started with; they count as version 0."""


class EngineError(RuntimeError):
    """An engine failed or refused. The message names its URL, what was asked, and what to do."""


class TransportError(EngineError):
    """The connection failed, or something in front of the engine said 502; the request may be sent again."""


class EngineBusy(EngineError):
    """The engine has no room now (HTTP 429 or 503); the same may be asked for again after a pause."""


class ReplicaError(EngineError):
    """The replica failed at the request (HTTP 5xx), which says nothing against asking another one."""


class ProtocolError(ReplicaError):
    """An engine's answer does not follow the protocol: none of it is used, and another replica may be asked."""


class RequestLost(EngineError):
    """There is no answer, and the replica is not to blame: the same may be asked for again, under another name."""


class GenerationAborted(EngineError):
    """The engine ended a request that nobody here had asked it to end."""


@dataclass(frozen=True)
class SamplingSettings:
    """How a response is sampled. `max_new_tokens`: its longest length, what is there already included.

    `routes`: the pack in which routes of experts are kept (see `RouteStore`), None where nobody wants to know them.
    """

    temperature: float
    max_new_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    routes: str | None = None


class Prompt(NamedTuple):
    """One sequence to go on with: `rid` names the request, `tokens` int64 [P], at most `max_new_tokens` follow.

    Engines share cached prefixes among requests of one `cache_key` only. It is the weights version, since keys and
    values of older weights stay in an engine that was updated while requests kept theirs (`engine.pause_mode`). Routes
    are wanted of the tokens from `routed` on: the others have been reported already.
    """

    rid: str
    tokens: Tokens
    seed: int
    max_new_tokens: int
    settings: SamplingSettings
    cache_key: str = ""
    routed: int = 0


class Generation(NamedTuple):
    """An engine's answer: tokens int64 [R], log_probs float32 [R] at the sampling temperature, spans over [0, R).

    `finish_reason` is stop, length or abort; `message` is what the engine says of an abort, which may leave R = 0.
    `rows` are routes of experts [tokens, MoE layers, top_k] as they came, until `routes` says where they are kept.
    """

    tokens: Tokens
    log_probs: LogProbs
    spans: list[Span]
    finish_reason: str
    message: str = ""
    rows: Rows | None = None
    routes: RoutePart | None = None


def require_prompts(samples: Iterable[Sample], vocab_size: int) -> None:
    """Refuse what a real SGLang does not check and dies of.

    Raises:
        EngineError: a prompt has no tokens, or one that the model does not know.
    """
    for sample in samples:
        tokens = sample.prompt_tokens
        if len(tokens) == 0:
            raise EngineError(f"{sample.id} has no prompt tokens; is the chat template of the model empty?")
        if not within(tokens, vocab_size):
            raise EngineError(
                f"{sample.id} has the prompt token {outside(tokens, vocab_size)}, outside the model's vocabulary of "
                f"{vocab_size}; do tokenizer and model belong together?"
            )


def within(tokens: Tokens, vocab_size: int) -> bool:
    """Whether all, of at least one, are in the vocabulary. Negative ones count as very large."""
    return bool(tokens.view(np.uint64).max() < vocab_size)


def outside(tokens: Tokens, vocab_size: int) -> int:
    """The first that is not."""
    return int(tokens[(tokens < 0) | (tokens >= vocab_size)][0])


def generate_request(prompts: Sequence[Prompt]) -> bytes:
    """Body of one batched POST /generate; answers come back in the order of `prompts`.

    Where an engine heeds seeds, a token depends on seed and position in the sequence alone, so that a response made in
    segments is the one made at once.
    """
    body: dict[str, Any] = {
        "rid": [p.rid for p in prompts],
        "input_ids": [p.tokens for p in prompts],
        "sampling_params": [_sampling_params(p) for p in prompts],
        "return_logprob": True,
        "logprob_start_len": -1,
        "extra_key": [p.cache_key for p in prompts],
    }
    if prompts[0].settings.routes is not None:
        (start,) = {p.routed for p in prompts}  # one for all: what is asked for together begins together
        body |= {"return_routed_experts": True, "routed_experts_start_len": start}
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)


def _sampling_params(prompt: Prompt) -> dict[str, Any]:
    settings = prompt.settings
    return {
        "temperature": settings.temperature,
        "max_new_tokens": prompt.max_new_tokens,
        "stop_token_ids": list(settings.stop_token_ids),
        "top_p": settings.top_p,
        "top_k": settings.top_k,
        "min_p": settings.min_p,
        "sampling_seed": prompt.seed,
    }


def parse_version(label: Any) -> int:
    """`"12"` -> 12, SGLang's initial `"default"` -> 0. Raises ValueError for anything else."""
    if label == INITIAL_VERSION:
        return 0
    if not (isinstance(label, str) and label.isascii() and label.isdigit()):
        raise ValueError(f"{label!r} is no weights version")
    return int(label)


def version_of(label: Any) -> int | None:
    """The same; None for anything else."""
    try:
        return parse_version(label)
    except ValueError:
        return None
