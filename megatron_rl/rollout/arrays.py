"""The usual answer of `/generate` straight from its bytes into arrays. What is unusual is left to `protocol.py`.

orjson makes an object of every number, which takes most of a client's time; simdjson copies numbers into buffers. Here
an answer is understood completely and passes every check, or None says so: then the careful reader finds the words.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import simdjson

from .sample import LogProbs, Tokens

Usual = tuple[Tokens, LogProbs, Any, str]
"""tokens int64 [R], log_probs float32 [R], the entry weight_versions, finish_reason."""

_parser = simdjson.Parser()


def usual_answers(body: bytes, longest: Sequence[int], vocab_size: int) -> list[Usual] | None:
    """One entry for each sequence, of which `longest` gives the most tokens asked for."""
    try:
        # Entries are [log_prob, token_id, null]: without the null, which is no number, they are one flat buffer.
        answers = _parser.parse(body.replace(b",null]", b"]"))
        if not isinstance(answers, simdjson.Array) or len(answers) != len(longest):
            return None
        found = [_usual(answer, most, vocab_size) for answer, most in zip(answers, longest, strict=True)]
    except (ValueError, TypeError, KeyError, AttributeError):
        return None  # not JSON, a null among the numbers, a field that is missing or of another type
    return [entry for entry in found if entry is not None] if None not in found else None


def _usual(answer: Any, longest: int, vocab_size: int) -> Usual | None:
    meta = answer["meta_info"]
    reason = meta["finish_reason"]["type"]
    tokens = np.frombuffer(answer["output_ids"].as_buffer(of_type="i"), np.int64)
    pairs = np.frombuffer(meta["output_token_logprobs"].as_buffer(of_type="d"), np.float64)
    log_probs = pairs[::2].astype(np.float32)
    whole = (
        reason in ("stop", "length")
        and 0 < len(tokens) <= longest
        and len(pairs) == 2 * len(tokens)
        and bool((pairs[1::2] == tokens).all())
        and bool(tokens.view(np.uint64).max() < vocab_size)
        and bool(np.isfinite(log_probs).all())
    )
    return (tokens, log_probs, meta["weight_versions"].as_list(), reason) if whole else None
