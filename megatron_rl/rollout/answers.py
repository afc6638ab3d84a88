"""An engine's answer to `/generate`, read strictly into numpy: understood as a whole, or refused. No HTTP here.

The usual answer is read by `arrays.py`; this is the careful reader, of what is short, aborted or wrong. What no engine
can mean (a log-prob above 0, versions that go backwards) is a fault, too: the first one is named in one
`ProtocolError`, with the engine, the request and the field.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import orjson

from megatron_rl.routes.store import Rows

from .arrays import REASONS, ROUNDING, usual_answers
from .protocol import Generation, GenerationAborted, Prompt, ProtocolError, outside, parse_version, within
from .routed import RouteFormat, rows_wanted
from .sample import LogProbs, Span, Tokens


def parse_generations(
    body: bytes, prompts: Sequence[Prompt], *, url: str, vocab_size: int, routes: RouteFormat | None = None
) -> list[Generation]:
    """Read the answer to `generate_request`; `routes` is the format of those that the prompts ask for.

    Raises:
        ProtocolError: not JSON, another number of answers, or of another request, a missing or ill-typed field, a
            log-prob that is missing, not finite or above 0, a response that is empty or longer than asked for, token
            ids outside the vocabulary, versions that go backwards, an unknown end, or routes that cannot be theirs.
        GenerationAborted: the engine gave a sequence up with a status of its own.
    """
    wanted = routes if prompts[0].settings.routes is not None else None
    readers = [_Reader(url, prompt, vocab_size, wanted) for prompt in prompts]
    usual = usual_answers(body, prompts, vocab_size, wanted)
    if usual is not None:
        return [
            Generation(u.tokens, u.log_probs, reader.spans(u.versions, len(u.tokens)), u.reason, rows=u.rows)
            for u, reader in zip(usual, readers, strict=True)
        ]
    # A parsed answer has a small list per token, none of it garbage: looking through them took most of the time.
    enabled = gc.isenabled()
    gc.disable()
    try:
        return parse_carefully(body, readers, url)
    finally:
        if enabled:
            gc.enable()


def parse_carefully(body: bytes, readers: Sequence[_Reader], url: str) -> list[Generation]:
    """Every answer, whatever is unusual about it. Raises what `parse_generations` raises."""
    try:
        answers = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ProtocolError(f"engine {url}: the answer of /generate is not JSON ({error}): {body[:200]!r}") from error
    if isinstance(answers, dict):
        answers = [answers]
    if not isinstance(answers, list) or len(answers) != len(readers):
        found = len(answers) if isinstance(answers, list) else type(answers).__name__
        raise ProtocolError(f"engine {url}: /generate was asked for {len(readers)} sequences and answered {found}")
    return [reader.generation(answer) for reader, answer in zip(readers, answers, strict=True)]


class _Reader(NamedTuple):
    """Of the answer to one prompt."""

    url: str
    prompt: Prompt
    vocab_size: int
    routes: RouteFormat | None

    def generation(self, answer: Any) -> Generation:
        meta = self._field(answer, "meta_info", dict)
        if meta.get("id", self.prompt.rid) != self.prompt.rid:
            raise self._wrong("meta_info.id", f"is {meta['id']!r}: the answer to another request")
        reason = self._field(meta, "finish_reason", dict, "meta_info.")
        kind: str = self._field(reason, "type", str, "meta_info.finish_reason.")
        if kind not in REASONS:
            raise self._wrong("meta_info.finish_reason.type", f"is {kind!r}; {', '.join(REASONS)} are known")
        if kind == "abort" and reason.get("status_code"):
            raise GenerationAborted(
                f"engine {self.url}: {self.prompt.rid} ended with status {reason['status_code']}: "
                f"{reason.get('message')}"
            )
        ids = self._field(answer, "output_ids", list)
        tokens = self._tokens(ids)
        if not len(tokens) and kind != "abort":
            raise self._wrong("output_ids", f"is empty, but the response ended with {kind!r}, not with an abort")
        log_probs = self._log_probs(meta, ids) if ids else np.empty(0, np.float32)
        spans = self._spans(meta, len(tokens))
        message = str(reason.get("message") or "")
        return Generation(tokens, log_probs, spans, kind, message, self._rows(meta, kind, len(tokens)))

    def _rows(self, meta: dict[str, Any], kind: str, length: int) -> Rows | None:
        """Nothing of an answer without tokens, which will be asked for again; an abort may come without routes."""
        if self.routes is None or not length or (kind == "abort" and "routed_experts" not in meta):
            return None
        if "routed_experts" not in meta:
            raise self._wrong(
                "meta_info.routed_experts",
                "is missing although it was asked for; start the server with --enable-return-routed-experts and reach "
                "it without a router in between, or set engine.routed_experts=false",
            )
        text = self._field(meta, "routed_experts", str, "meta_info.")
        try:
            return self.routes.rows(text, rows_wanted(self.prompt, length))
        except ValueError as error:
            raise self._wrong("meta_info.routed_experts", str(error)) from error

    def _tokens(self, ids: list[Any]) -> Tokens:
        strange = next((value for value in ids if type(value) is not int), None)
        try:
            tokens = np.array(ids if strange is None else (), np.int64)
        except OverflowError as error:
            raise self._wrong("output_ids", f"must be token ids ({error})") from error
        if strange is not None or len(tokens) < len(ids):
            raise self._wrong("output_ids", f"must be token ids in a flat list; it holds {strange!r:.60}")
        most = self.prompt.max_new_tokens
        if len(tokens) > most:
            raise self._wrong("output_ids", f"has {len(tokens)} tokens, but max_new_tokens={most} was asked for")
        if len(tokens) and not within(tokens, self.vocab_size):
            raise self._wrong(
                "output_ids",
                f"holds id {outside(tokens, self.vocab_size)}, outside the vocabulary of {self.vocab_size}; does this "
                "engine serve another model?",
            )
        return tokens

    def _log_probs(self, meta: dict[str, Any], tokens: list[Any]) -> LogProbs:
        """Entries are [log_prob, token_id, text]; null stands where JSON cannot write NaN."""
        name = "meta_info.output_token_logprobs"
        entries = self._field(meta, "output_token_logprobs", list, "meta_info.")
        if len(entries) != len(tokens):
            raise self._wrong(name, f"has {len(entries)} entries for {len(tokens)} tokens")
        try:
            values = [entry[0] for entry in entries]
            ids = [entry[1] for entry in entries]
            log_probs = np.array(values, np.float32)
        except (TypeError, ValueError, IndexError, KeyError, OverflowError) as error:
            raise self._wrong(name, f"must be [log_prob, token_id, text] entries ({error!r})") from error
        if log_probs.ndim != 1 or any(isinstance(value, str | bool) for value in values):
            raise self._wrong(name, "must be [log_prob, token_id, text] entries with a number first")
        wrong = ~(np.isfinite(log_probs) & (log_probs <= ROUNDING))
        if wrong.any():
            bad = int(np.flatnonzero(wrong)[0])
            why = "the engine's logits broke" if not np.isfinite(log_probs[bad]) else "no probability is above 1"
            raise self._wrong(name, f"is {log_probs[bad]} at token {bad} of {len(tokens)}; {why}")
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
        name = "meta_info.weight_versions"
        try:
            spans = [Span(parse_version(e["version"]), e["start"], e["end"]) for e in entries if e["end"] > e["start"]]
        except (KeyError, TypeError, ValueError) as error:
            raise self._wrong(name, f"is not readable ({error!r}): {entries}") from error
        bounds = [0, *(s.end for s in spans)]
        whole = all(type(bound) is int for span in spans for bound in (span.start, span.end))
        if not whole or [s.start for s in spans] != bounds[:-1] or bounds[-1] != length:
            raise self._wrong(name, f"does not cover the {length} tokens: {entries}")
        versions = [span.version for span in spans]
        if versions != sorted(versions):
            raise self._wrong(name, f"goes back to older weights in one response: {entries}")
        return spans

    def _field(self, holder: Any, name: str, kind: type, where: str = "") -> Any:
        value = holder.get(name) if isinstance(holder, dict) else None
        if not isinstance(value, kind):
            found = "is missing" if value is None else f"must be a {kind.__name__}, not {type(value).__name__}"
            raise self._wrong(where + name, found)
        return value

    def _wrong(self, name: str, what: str) -> ProtocolError:
        return ProtocolError(f"engine {self.url}: /generate answer for {self.prompt.rid}: field {name} {what}")
