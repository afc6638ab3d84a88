"""An engine whose every token says which sample, position and weights it is of: a lost or doubled one shows.

Experts say of which sample, position and layer they are, where routes are asked for.

As an `Exchange` in memory, with a script of failures, and as a server, also in a process of its own that can be killed:
`python -m tests.unit.coded_engine PORT`. Holds no tests.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import numpy as np
import orjson
from aiohttp import web

from megatron_rl.rollout.protocol import Generation, Prompt, RequestLost, SamplingSettings, TransportError
from megatron_rl.rollout.routed import RouteFormat
from megatron_rl.rollout.sample import Group, Sample, Span
from megatron_rl.routes import RoutePart, RouteStore

PROMPT = (1, 2, 3)
VOCABULARY = 10**9
LONGEST = 40
SETTINGS = SamplingSettings(temperature=1.0, max_new_tokens=LONGEST)
LAYERS, MOE_LAYERS, TOP_K, EXPERTS = 4, (1, 3), 2, 30_000


def start(group_id: int, size: int) -> Group:
    return Group.start(group_id, "p", np.array(PROMPT, np.int64), size, run_seed=0, version=0, temperature=1.0)


def number_of(name: str) -> int:
    """Of a sample, from its id or a request's."""
    return int(name[1:10]) * 8 + int(name[11:14])


def length_of(sample: int) -> int:
    """Of its response; some are longer than allowed."""
    return 3 + sample * 13 % 44


def token_of(sample: int, position: int, version: int) -> int:
    return (sample * 1000 + position) * 100 + version


def log_prob_of(position: int, version: int) -> float:
    return -(position + version / 128)


def require_exact(sample: Sample) -> None:
    """Every token is there once, in its place, with the version and log-prob that the engine had for it."""
    number = number_of(sample.id)
    versions = [span.version for span in sample.spans for _ in range(span.start, span.end)]
    assert sample.response_tokens.tolist() == [token_of(number, i, v) for i, v in enumerate(versions)]
    assert sample.log_probs.tolist() == [log_prob_of(i, v) for i, v in enumerate(versions)]
    assert versions == sorted(versions)
    if sample.finished:
        whole = length_of(number)
        assert (sample.finish_reason, sample.response_length) == (
            ("stop", whole) if whole <= LONGEST else ("length", LONGEST)
        )


def format_in(folder: object) -> RouteFormat:
    """Of this engine's routes, kept in `folder`."""
    return RouteFormat(str(folder), LAYERS, MOE_LAYERS, TOP_K, EXPERTS)


def routes_of(sample: int, begin: int, end: int) -> np.ndarray:
    """Of the tokens [begin, end) of prompt and response, int32 [end - begin, LAYERS, TOP_K]; -1 in dense layers."""
    found = np.full((end - begin, LAYERS, TOP_K), -1, np.int32)
    for layer in MOE_LAYERS:
        found[:, layer, 0] = sample % 300 * 64 + np.arange(begin, end)
        found[:, layer, 1] = 25_000 + layer
    return found


def require_exact_routes(sample: Sample, store: RouteStore) -> None:
    """Every token that is said to be routed has its own experts, in both layers, and the others have none."""
    length = sample.prompt_length + sample.response_length
    found = store.read(sample.routes, range(len(MOE_LAYERS)), 0, length)
    known = routes_of(number_of(sample.id), 0, sample.routed)[:, MOE_LAYERS]
    np.testing.assert_array_equal(found[:, : sample.routed], known.swapaxes(0, 1))
    assert (found[:, sample.routed :] == -1).all()
    assert sample.routed < length
    if sample.finished:
        assert sample.routed == length - 1


def go_on(rid: str, ids: Sequence[int], longest: int) -> tuple[list[int], str]:
    """Positions to generate, if nothing comes between, and why they end. The prompt must be what was said before."""
    sample, have = number_of(rid), len(ids) - len(PROMPT)
    assert tuple(ids[: len(PROMPT)]) == PROMPT
    assert [token // 100 for token in ids[len(PROMPT) :]] == [sample * 1000 + i for i in range(have)]
    end = length_of(sample)
    assert have < end, "asked to go on after the end"
    return list(range(have, min(end, have + longest))), "stop" if end <= have + longest else "length"


class CodedExchange:
    """In memory. `script` says how each request goes; after its end all go well.

    whole; update: the weights change in the middle; refused, lost: the connection fails before or after the engine has
    generated; worker: nobody's fault; aborted: by the engine itself, in the middle, or unrouted: without routes; held:
    until it is aborted. Routes are kept in one of `stores` after the other, as by several workers.
    """

    def __init__(self, script: Sequence[str], stores: Sequence[RouteStore] = ()) -> None:
        self._script: Iterator[str] = iter(script)
        self._stores = itertools.cycle(stores)
        self._aborted = asyncio.Event()
        self.held = asyncio.Event()
        self.version = 0
        self.rids: list[str] = []

    async def generate(self, url: str, prompts: Sequence[Prompt]) -> list[Generation]:
        self.rids += [prompt.rid for prompt in prompts]
        action = next(self._script, "whole")
        before = self.version
        if action == "held":
            self._aborted.clear()
            self.held.set()
            await self._aborted.wait()
        if action == "update":
            self.version += 1
        cut = action in ("aborted", "unrouted", "held")
        answers = [self._segment(prompt, before, cut, action != "unrouted") for prompt in prompts]
        if action == "worker":
            raise RequestLost("the worker died")
        if action in ("refused", "lost"):
            raise TransportError("connection reset")
        return answers

    def _segment(self, prompt: Prompt, before: int, cut: bool, routed: bool) -> Generation:
        positions, reason = go_on(prompt.rid, prompt.tokens.tolist(), prompt.max_new_tokens)
        middle = len(positions) // 2
        if cut:
            positions, reason = positions[:middle], "abort"
        versions = [before if i < middle else self.version for i in range(len(positions))]
        sample = number_of(prompt.rid)
        return Generation(
            np.array([token_of(sample, p, v) for p, v in zip(positions, versions, strict=True)], np.int64),
            np.array([log_prob_of(p, v) for p, v in zip(positions, versions, strict=True)], np.float32),
            [Span(v, i, i + 1) for i, v in enumerate(versions)],
            reason,
            routes=self._keep(prompt, len(positions)) if routed and positions else None,
        )

    def _keep(self, prompt: Prompt, generated: int) -> RoutePart | None:
        pack = prompt.settings.routes
        if pack is None:
            return None
        rows = routes_of(number_of(prompt.rid), prompt.routed, len(prompt.tokens) + generated - 1)
        return next(self._stores).append(rows[:, MOE_LAYERS], prompt.routed, pack)

    async def abort(self, url: str, rids: Sequence[str]) -> None:
        self._aborted.set()


class CodedServer:
    """The routes. `pace` is awaited before every token."""

    def __init__(self, pace: Callable[[], Awaitable[None]] = lambda: asyncio.sleep(0)) -> None:
        self._pace = pace
        self._aborted: set[str] = set()
        self.requests = 0
        self.paused = asyncio.Event()
        self.paused.set()

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort)
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/model_info", self._model_info)
        app.router.add_get("/v1/loads", self._loads)
        return app

    async def _generate(self, request: web.Request) -> web.Response:
        self.requests += 1
        body = json.loads(await request.read())
        batch = zip(body["rid"], body["input_ids"], body["sampling_params"], strict=True)
        start = body["routed_experts_start_len"] if body.get("return_routed_experts") else None
        answers = await asyncio.gather(*(self._sequence(rid, ids, p["max_new_tokens"], start) for rid, ids, p in batch))
        return web.Response(body=orjson.dumps(answers))

    async def _sequence(self, rid: str, ids: list[int], longest: int, start: int | None) -> dict[str, Any]:
        positions, reason = go_on(rid, ids, longest)
        sample, done = number_of(rid), 0
        for _ in positions:
            await self._pace()
            if rid in self._aborted:
                reason = "abort"
                break
            done += 1
        tokens = [token_of(sample, p, 0) for p in positions[:done]]
        routes = {}
        if start is not None and done:
            rows = routes_of(sample, start, len(ids) + done - 1)
            routes["routed_experts"] = base64.b64encode(rows.tobytes()).decode()
        return {
            "output_ids": tokens,
            "meta_info": {
                "id": rid,
                "finish_reason": {"type": reason, "message": "Aborted"},
                "weight_versions": [{"version": "default", "start": 0, "end": done}],
                **routes,
                "output_token_logprobs": [
                    [log_prob_of(p, 0), t, None] for p, t in zip(positions, tokens, strict=False)
                ],
            },
        }

    async def _abort(self, request: web.Request) -> web.Response:
        self._aborted.add((await request.json())["rid"])
        return web.Response()

    async def _ready(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _model_info(self, _: web.Request) -> web.Response:
        return web.json_response({"weight_version": "default"})

    async def _loads(self, _: web.Request) -> web.Response:
        return web.json_response({"loads": [{"num_running_reqs": 0, "num_waiting_reqs": 0}]})


if __name__ == "__main__":
    web.run_app(CodedServer(lambda: asyncio.sleep(0.001)).app(), host="127.0.0.1", port=int(sys.argv[1]), print=None)
