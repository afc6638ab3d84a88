"""What the server answers: finished requests and states of the engine as plain data in SGLang's field names."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pybase64

from .request import Request
from .weights import overall_checksum


def generation(request: Request, text: str | None, return_log_probs: bool, seconds: float) -> dict[str, Any]:
    """One element of the answer to /generate; without a tokenizer it has no `text`, as in SGLang."""
    output_ids = request.output_ids.tolist()
    meta: dict[str, Any] = {"id": request.rid, "finish_reason": request.finish_reason}
    if request.prefilled or request.sampling.max_new_tokens == 0:
        meta["prompt_tokens"] = len(request.prompt)
        meta["cached_tokens"] = request.cached_tokens
        meta["cached_tokens_details"] = {"device": request.cached_tokens, "host": 0}
        meta["num_retractions"] = request.num_retractions
        meta["reasoning_tokens"] = 0
    meta["completion_tokens"] = len(output_ids)
    spans = request.version_spans()
    meta["weight_version"] = spans[-1].version
    meta["weight_versions"] = [asdict(span) for span in spans]
    if return_log_probs:
        if request.input_log_probs_from is not None:
            meta["input_token_logprobs"] = _input_log_probs(request, request.input_log_probs_from)
        pairs = zip(request.log_probs.tolist(), output_ids, strict=True)
        meta["output_token_logprobs"] = [(log_prob, token, None) for log_prob, token in pairs]
        meta["output_token_logprobs_length"] = len(output_ids)
    if request.routed_experts is not None:
        meta["routed_experts"] = pybase64.b64encode_as_string(request.routed_experts.tobytes())
    meta["dp_rank"] = None
    meta["e2e_latency"] = seconds
    answer: dict[str, Any] = {} if text is None else {"text": text}
    return {**answer, "output_ids": output_ids, "meta_info": meta}


def _input_log_probs(request: Request, start: int) -> list[tuple[float | None, int, None]]:
    """The first has no predecessor to be predicted from. A request that was aborted while waiting has none computed."""
    if request.input_log_probs is None:
        return []
    known: list[float | None] = [None, *request.input_log_probs.tolist()]
    return [(value, token, None) for value, token in zip(known, request.prompt[start:].tolist(), strict=True)]


def checksum(checksums: dict[str, str]) -> dict[str, Any]:
    """The answer to /weights_checker: one rank, since the model is not sharded."""
    overall = overall_checksum(checksums)
    place = {"role": "target", "rank": 0, "size": 1}
    for axis in ("tp", "dp", "pp"):
        place |= {f"{axis}_rank": 0, f"{axis}_size": 1}
    ranks = [{"checksums": checksums, "per_gpu_checksum": overall, "parallelism_info": [place]}]
    return {"success": True, "message": "Success", "ranks": ranks, "per_engine_checksum": overall}


def error(message: str) -> dict[str, Any]:
    """The body of a refused request."""
    return {"error": {"message": message}}
