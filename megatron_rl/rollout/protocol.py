"""SGLang's `/generate` in plain data: building the request, reading the answer strictly into numpy. No HTTP here.

An answer is either understood as a whole or refused with one `ProtocolError` that names the engine and the field.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import orjson

from .arrays import usual_answers
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
    """How a response is sampled. `max_new_tokens`: its longest length, what is there already included."""

    temperature: float
    max_new_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0


class Prompt(NamedTuple):
    """One sequence to go on with: `rid` names the request, `tokens` int64 [P], at most `max_new_tokens` follow.

    Engines share cached prefixes among requests of one `cache_key` only. It is the weights version, since keys and
    values of older weights stay in an engine that was updated while requests kept theirs (`engine.pause_mode`).
    """

    rid: str
    tokens: Tokens
    seed: int
    max_new_tokens: int
    settings: SamplingSettings
    cache_key: str = ""


class Generation(NamedTuple):
    """An engine's answer: tokens int64 [R], log_probs float32 [R] at the sampling temperature, spans over [0, R).

    `finish_reason` is stop, length or abort; `message` is what the engine says of an abort, which may leave R = 0.
    """

    tokens: Tokens
    log_probs: LogProbs
    spans: list[Span]
    finish_reason: str
    message: str = ""


def require_prompts(samples: Iterable[Sample], vocab_size: int) -> None:
    """Refuse what a real SGLang does not check and dies of.

    Raises:
        EngineError: a prompt has no tokens, or one that the model does not know.
    """
    for sample in samples:
        tokens = sample.prompt_tokens
        if len(tokens) == 0:
            raise EngineError(f"{sample.id} has no prompt tokens; is the chat template of the model empty?")
        if not _within(tokens, vocab_size):
            raise EngineError(
                f"{sample.id} has the prompt token {_outside(tokens, vocab_size)}, outside the model's vocabulary of "
                f"{vocab_size}; do tokenizer and model belong together?"
            )


def _within(tokens: Tokens, vocab_size: int) -> bool:
    """Negative ones count as very large."""
    return bool(tokens.view(np.uint64).max() < vocab_size)


def _outside(tokens: Tokens, vocab_size: int) -> int:
    return int(tokens[(tokens < 0) | (tokens >= vocab_size)][0])


def generate_request(prompts: Sequence[Prompt]) -> bytes:
    """Body of one batched POST /generate; answers come back in the order of `prompts`.

    Where an engine heeds seeds, a token depends on seed and position in the sequence alone, so that a response made in
    segments is the one made at once.
    """
    body = {
        "rid": [p.rid for p in prompts],
        "input_ids": [p.tokens for p in prompts],
        "sampling_params": [_sampling_params(p) for p in prompts],
        "return_logprob": True,
        "logprob_start_len": -1,
        "extra_key": [p.cache_key for p in prompts],
    }
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


def parse_generations(body: bytes, prompts: Sequence[Prompt], *, url: str, vocab_size: int) -> list[Generation]:
    """Read the answer to `generate_request`.

    Raises:
        ProtocolError: not JSON, another number of answers, a missing or ill-typed field, log-probs that are missing,
            NaN or infinite, a response that is empty or longer than asked for, or token ids outside the vocabulary.
        GenerationAborted: the engine gave a sequence up with a status of its own.
    """
    usual = usual_answers(body, [prompt.max_new_tokens for prompt in prompts], vocab_size)
    if usual is not None:
        return [
            Generation(tokens, log_probs, _Reader(url, prompt.rid).spans(versions, len(tokens)), reason)
            for (tokens, log_probs, versions, reason), prompt in zip(usual, prompts, strict=True)
        ]
    # A parsed answer has a small list per token, none of it garbage: looking through them took most of the time.
    enabled = gc.isenabled()
    gc.disable()
    try:
        return _parse(body, prompts, url, vocab_size)
    finally:
        if enabled:
            gc.enable()


def _parse(body: bytes, prompts: Sequence[Prompt], url: str, vocab_size: int) -> list[Generation]:
    try:
        answers = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ProtocolError(f"engine {url}: the answer of /generate is not JSON ({error}): {body[:200]!r}") from error
    if isinstance(answers, dict):
        answers = [answers]
    if not isinstance(answers, list) or len(answers) != len(prompts):
        found = len(answers) if isinstance(answers, list) else type(answers).__name__
        raise ProtocolError(f"engine {url}: /generate was asked for {len(prompts)} sequences and answered {found}")
    return [
        _Reader(url, prompt.rid).generation(answer, prompt.max_new_tokens, vocab_size)
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


def parse_version(label: Any) -> int:
    """`"12"` -> 12, SGLang's initial `"default"` -> 0. Raises ValueError for anything else."""
    return 0 if label == INITIAL_VERSION else int(label)


def version_of(label: Any) -> int | None:
    """The same; None for anything else."""
    try:
        return parse_version(label)
    except (TypeError, ValueError):
        return None


class _Reader(NamedTuple):
    url: str
    rid: str

    def generation(self, answer: Any, max_new_tokens: int, vocab_size: int) -> Generation:
        meta = self._field(answer, "meta_info", dict)
        reason = self._field(meta, "finish_reason", dict, "meta_info.")
        kind: str = self._field(reason, "type", str, "meta_info.finish_reason.")
        if kind == "abort" and reason.get("status_code"):
            raise GenerationAborted(
                f"engine {self.url}: {self.rid} ended with status {reason['status_code']}: {reason.get('message')}"
            )
        ids = self._field(answer, "output_ids", list)
        tokens = self._tokens(ids, max_new_tokens, vocab_size)
        if not len(tokens) and kind != "abort":
            raise self._wrong("output_ids", f"is empty, but the response ended with {kind!r}, not with an abort")
        log_probs = self._log_probs(meta, ids) if ids else np.empty(0, np.float32)
        spans = self._spans(meta, len(tokens))
        return Generation(tokens, log_probs, spans, kind, str(reason.get("message") or ""))

    def _tokens(self, ids: list[Any], max_new_tokens: int, vocab_size: int) -> Tokens:
        try:
            tokens = np.array(ids, np.int64)
        except (TypeError, ValueError, OverflowError) as error:
            raise self._wrong("output_ids", f"must be token ids ({error})") from error
        if tokens.ndim != 1:
            raise self._wrong("output_ids", f"must be a flat list, not of shape {tokens.shape}")
        if len(tokens) > max_new_tokens:
            raise self._wrong(
                "output_ids", f"has {len(tokens)} tokens, but max_new_tokens={max_new_tokens} was asked for"
            )
        if len(tokens) and not _within(tokens, vocab_size):
            raise self._wrong(
                "output_ids",
                f"holds id {_outside(tokens, vocab_size)}, outside the vocabulary of {vocab_size}; does this engine "
                "serve another model?",
            )
        return tokens

    def _log_probs(self, meta: dict[str, Any], tokens: list[Any]) -> LogProbs:
        """Entries are [log_prob, token_id, text]; null stands where JSON cannot write NaN."""
        name = "meta_info.output_token_logprobs"
        entries = self._field(meta, "output_token_logprobs", list, "meta_info.")
        if len(entries) != len(tokens):
            raise self._wrong(name, f"has {len(entries)} entries for {len(tokens)} tokens")
        try:
            log_probs = np.array([entry[0] for entry in entries], np.float32)
            ids = [entry[1] for entry in entries]
        except (TypeError, ValueError, IndexError, OverflowError) as error:
            raise self._wrong(name, f"must be [log_prob, token_id, text] entries ({error})") from error
        if not np.isfinite(log_probs).all():
            bad = np.flatnonzero(~np.isfinite(log_probs))[0]
            raise self._wrong(name, f"is {log_probs[bad]} at token {bad} of {len(tokens)}; the engine's logits broke")
        if ids != tokens:
            raise self._wrong(name, "names other token ids than output_ids")
        return log_probs

    def _spans(self, meta: dict[str, Any], length: int) -> list[Span]:
        """Engines without `weight_versions` report only the version at the end, which then counts for all tokens."""
        if length == 0:
            return []
        entries = meta.get("weight_versions")
        if entries is None:
            entries = [{"version": self._field(meta, "weight_version", str, "meta_info."), "start": 0, "end": length}]
        return self.spans(entries, length)

    def spans(self, entries: Any, length: int) -> list[Span]:
        """Those of `length` tokens. Raises ProtocolError."""
        try:
            spans = [Span(parse_version(e["version"]), e["start"], e["end"]) for e in entries if e["end"] > e["start"]]
        except (KeyError, TypeError, ValueError) as error:
            raise self._wrong("meta_info.weight_versions", f"is not readable ({error!r}): {entries}") from error
        bounds = [0, *(s.end for s in spans)]
        if [s.start for s in spans] != bounds[:-1] or bounds[-1] != length:
            raise self._wrong("meta_info.weight_versions", f"does not cover the {length} tokens: {entries}")
        return spans

    def _field(self, holder: Any, name: str, kind: type, where: str = "") -> Any:
        value = holder.get(name) if isinstance(holder, dict) else None
        if not isinstance(value, kind):
            found = "is missing" if value is None else f"must be a {kind.__name__}, not {type(value).__name__}"
            raise self._wrong(where + name, found)
        return value

    def _wrong(self, name: str, what: str) -> ProtocolError:
        return ProtocolError(f"engine {self.url}: /generate answer for {self.rid}: field {name} {what}")
