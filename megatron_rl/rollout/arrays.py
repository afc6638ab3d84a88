"""The usual answer of `/generate` straight from its bytes into arrays. What is unusual is left to `answers.py`.

orjson makes an object of every number, which takes most of a client's time; simdjson copies numbers into buffers, and
routes of experts, by far the most bytes of an answer that has them, are taken out before anything is parsed. Here an
answer is understood completely and passes every check, or None says so: then the careful reader finds the words.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import simdjson

from megatron_rl.routes.store import Rows

from .protocol import Prompt, within
from .routed import RouteFormat, rows_wanted
from .sample import LogProbs, Tokens

REASONS = ("stop", "length", "abort")
"""Why SGLang ends a sequence."""
ROUNDING = 1e-3
"""How far above 0 an engine's arithmetic may put the log-prob of a token that is as good as certain."""
_ROUTES = b'"routed_experts":"'

_parser = simdjson.Parser()


class Usual(NamedTuple):
    """tokens int64 [R], log_probs float32 [R], the entry weight_versions, finish_reason, routes if asked for."""

    tokens: Tokens
    log_probs: LogProbs
    versions: Any
    reason: str
    rows: Rows | None


def usual_answers(
    body: bytes, prompts: Sequence[Prompt], vocab_size: int, routes: RouteFormat | None = None
) -> list[Usual] | None:
    """One entry for each sequence; `routes` is None when they were not asked for."""
    try:
        rest, texts = (body, []) if routes is None else _without_routes(body)
        # Entries are [log_prob, token_id, null]: without the null, which is no number, they are one flat buffer.
        answers = _parser.parse(rest.replace(b",null]", b"]"))
        if not isinstance(answers, simdjson.Array) or len(answers) != len(prompts):
            return None
        found = []
        for answer, prompt in zip(answers, prompts, strict=True):
            usual = _usual(answer, prompt, vocab_size)
            if usual is None:
                return None
            found.append(usual if routes is None else _with_routes(usual, answer, prompt, routes, texts))
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RuntimeError):
        return None  # not JSON, too deep, a null among the numbers, a field that is missing or of another type
    return found


def _without_routes(body: bytes) -> tuple[bytes, list[memoryview]]:
    """The answer with numbers in place of the routes, and the routes. (No string of JSON holds quotes as they are.)"""
    pieces: list[bytes] = []
    texts: list[memoryview] = []
    at, view = 0, memoryview(body)
    while (found := body.find(_ROUTES, at)) >= 0:
        start = found + len(_ROUTES)
        end = body.index(b'"', start)
        pieces += [body[at:start], b"%d" % len(texts)]
        texts.append(view[start:end])
        at = end
    return b"".join([*pieces, body[at:]]), texts


def _with_routes(usual: Usual, answer: Any, prompt: Prompt, routes: RouteFormat, texts: Sequence[memoryview]) -> Usual:
    text = texts[int(answer["meta_info"]["routed_experts"])]
    return usual._replace(rows=routes.rows(text, rows_wanted(prompt, len(usual.tokens))))


def _usual(answer: Any, prompt: Prompt, vocab_size: int) -> Usual | None:
    meta = answer["meta_info"]
    reason = meta["finish_reason"]["type"]
    tokens = np.frombuffer(answer["output_ids"].as_buffer(of_type="i"), np.int64)
    pairs = np.frombuffer(meta["output_token_logprobs"].as_buffer(of_type="d"), np.float64)
    log_probs = pairs[::2].astype(np.float32)
    whole = (
        reason in ("stop", "length")
        and meta["id"] == prompt.rid
        and 0 < len(tokens) <= prompt.max_new_tokens
        and len(pairs) == 2 * len(tokens)
        and bool((pairs[1::2] == tokens).all())
        and within(tokens, vocab_size)
        and bool(-np.inf < log_probs.min() and log_probs.max() <= ROUNDING)  # false for NaN, too
    )
    return Usual(tokens, log_probs, meta["weight_versions"].as_list(), reason, None) if whole else None
