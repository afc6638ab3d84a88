"""What the server answers: finished requests and states of the engine in SGLang's field names."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import orjson
import pybase64
from fastapi.responses import Response

from .request import Request
from .weights import overall_checksum


def answer(content: Any, status: int = 200) -> Response:
    """Plain data as an HTTP answer."""
    return Response(orjson.dumps(content), status, media_type="application/json")


def generation(request: Request, return_log_probs: bool) -> dict[str, Any]:
    """One element of the answer to /generate; without text, as SGLang without a tokenizer."""
    output_ids = request.output_ids.tolist()
    spans = request.version_spans()
    meta: dict[str, Any] = {
        "id": request.rid,
        "finish_reason": request.finish_reason,
        "completion_tokens": len(output_ids),
        "weight_version": spans[-1].version,
        "weight_versions": [asdict(span) for span in spans],
    }
    if request.prefilled or request.sampling.max_new_tokens == 0:  # one that ends before is told without, as by SGLang
        meta["prompt_tokens"] = len(request.prompt)
        meta["cached_tokens"] = request.cached_tokens
        meta["num_retractions"] = request.num_retractions
    if request.scored:
        meta["input_token_logprobs"] = _input_log_probs(request)
    if return_log_probs:
        pairs = zip(request.log_probs.tolist(), output_ids, strict=True)
        meta["output_token_logprobs"] = [(log_prob, token, None) for log_prob, token in pairs]
    if request.routed_experts is not None:
        meta["routed_experts"] = pybase64.b64encode_as_string(request.routed_experts.tobytes())
    return {"output_ids": output_ids, "meta_info": meta}


def _input_log_probs(request: Request) -> list[tuple[float | None, int, None]]:
    """The first has no predecessor to be predicted from. A request that was aborted while waiting has none computed."""
    if request.input_log_probs is None:
        return []
    known: list[float | None] = [None, *request.input_log_probs.tolist()]
    return [(value, token, None) for value, token in zip(known, request.prompt.tolist(), strict=True)]


def checksum(checksums: dict[str, str]) -> dict[str, Any]:
    """The answer to /weights_checker: one rank, since the model is not sharded."""
    overall = overall_checksum(checksums)
    return {"success": True, "ranks": [{"checksums": checksums}], "per_engine_checksum": overall}


def refusal(message: str) -> dict[str, Any]:
    """The body of a refused request: SGLang says it in one of these forms or the other, here in both."""
    return {"success": False, "message": message, "error": {"message": message}}
