#!/usr/bin/env python3
"""Requests per second of CPU time: the rollout client against bare aiohttp + orjson, at a server that does nothing.

The server is another process; it reads a request and sends bytes that were prepared before: one sequence as SGLang
answers it, with text, tokens, log-probs and version spans. Both sides send the same body and keep the same number of
requests in flight over kept connections.

- bare: aiohttp posts the body, orjson.loads reads the answer, which is then thrown away;
- ours: `EngineClient.generate` for one sample: gate, router, segments, the answer checked and turned into numpy arrays,
  log-probs included, appended to the sample. In this process, so that all of its work counts;
- ours with `--workers N`: the same through N worker processes, as runs with SGLang do by default.

In all of these the garbage collector looks less often, as controller and workers tell it (`rollout/garbage.py`); bare
is shown with Python's own settings, too. It has aiohttp's settings but for the limit of connections. Rounds
alternate. What is compared is requests per second of CPU time of all client processes, as other work on the machine
hardly changes it; requests per second of wall time are shown beside it. `--soak N` keeps ours busy for N seconds and
fits a line to the resident memory of this process, leaving out the first quarter.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import aiohttp
import numpy as np
import orjson
import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megatron_rl.rollout.client import EngineClient, Limits  # noqa: E402
from megatron_rl.rollout.connect import connect  # noqa: E402
from megatron_rl.rollout.garbage import look_less_often  # noqa: E402
from megatron_rl.rollout.protocol import Prompt, SamplingSettings, generate_request  # noqa: E402
from megatron_rl.rollout.sample import Group, Sample  # noqa: E402
from tools.bench_common import load_average, spread  # noqa: E402

VOCABULARY = 151_936
RID = b"s000000000-000.0000"
"""Stands in the prepared answer where the name of the request belongs."""
NAME = re.compile(rb'\{"rid":\["([^"]+)"\]')
"""How a request begins (see `generate_request`)."""
PROMPT_TOKENS = 256
OWN_SETTINGS = "bare (Python's own collector settings)"
Side = Callable[[int], Awaitable[None]]
Rates = tuple[float, float]


def prepared_answer(tokens: int) -> bytes:
    """One finished sequence of `tokens` tokens, as SGLang 0.5.23 answers it."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, VOCABULARY, tokens).tolist()
    log_probs = (-rng.exponential(1.0, tokens)).astype(np.float32).tolist()
    meta = {
        "id": RID.decode(),
        "finish_reason": {"type": "length", "length": tokens},
        "prompt_tokens": PROMPT_TOKENS,
        "weight_version": "3",
        "weight_versions": [{"version": "3", "start": 0, "end": tokens}],
        "num_retractions": 0,
        "output_token_logprobs": [[value, token, None] for value, token in zip(log_probs, ids, strict=True)],
        "output_token_logprobs_length": tokens,
        "reasoning_tokens": 0,
        "completion_tokens": tokens,
        "cached_tokens": 0,
        "cached_tokens_details": {"device": 0, "host": 0},
        "dp_rank": None,
        "e2e_latency": 1.25,
    }
    text = "".join(chr(97 + token % 26) for token in ids for _ in range(4))
    return json.dumps([{"text": text, "output_ids": ids, "meta_info": meta}], separators=(",", ":")).encode()


class Prepared(asyncio.Protocol):
    """The least HTTP server: the answer to a request is chosen by its path, and names that request."""

    answers: dict[bytes, bytes]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A new client."""
        assert isinstance(transport, asyncio.Transport)
        self._transport, self._received = transport, bytearray()

    def data_received(self, data: bytes) -> None:
        """Answer every request that is complete."""
        self._received += data
        while (end := self._received.find(b"\r\n\r\n")) >= 0:
            head = bytes(self._received[:end]).lower()
            at = head.find(b"content-length:")
            length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self._received) < end + 4 + length:
                return
            asked = bytes(self._received[end + 4 : end + 4 + length])
            del self._received[: end + 4 + length]
            body = self.answers.get(head.split(b" ", 2)[1].split(b"?")[0], b"{}")
            if found := NAME.match(asked):
                body = body.replace(RID, found[1], 1)
            start = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
            self._transport.write(start + body)


async def serve(tokens: int) -> None:
    """Until the process is killed; says its port on standard output."""
    Prepared.answers = {b"/generate": prepared_answer(tokens)}
    server = await asyncio.get_running_loop().create_server(Prepared, "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


async def repeat(requests: int, concurrency: int, one: Side) -> None:
    """`requests` calls of `one`, so many at a time."""
    numbers = iter(range(requests))

    async def work() -> None:
        for number in numbers:
            await one(number)

    await asyncio.gather(*(work() for _ in range(min(concurrency, requests))))


def bare(session: aiohttp.ClientSession, url: str, sample: Sample, settings: SamplingSettings) -> Side:
    """Post the body, read the JSON."""
    headers = {"Content-Type": "application/json"}

    async def one(_: int) -> None:
        prompt = Prompt(sample.next_request(), sample.prompt_tokens, sample.seed, settings.max_new_tokens, settings)
        sample.attempts = 0
        async with session.post(f"{url}/generate", data=generate_request([prompt]), headers=headers) as response:
            orjson.loads(await response.read())

    return one


def ours(client: EngineClient, settings: SamplingSettings, samples: list[Sample]) -> Side:
    """One sample from no token to finished."""

    async def one(_: int) -> None:
        sample = samples.pop()
        await client.generate([sample], settings)
        assert sample.finish_reason == "length"

    return one


PROMPT = np.arange(PROMPT_TOKENS)


def new_sample(number: int) -> Sample:
    """Without a token yet."""
    return Group.start(number, "p", PROMPT, 1, run_seed=0, version=3, temperature=1.0).samples[0]


async def timed(requests: int, concurrency: int, one: Side, workers: Collection[int] = ()) -> Rates:
    """Requests per second of CPU time, that of these processes included, and of wall time."""
    cpu, wall = cpu_seconds(workers), time.perf_counter()
    await repeat(requests, concurrency, one)
    return requests / (cpu_seconds(workers) - cpu), requests / (time.perf_counter() - wall)


def cpu_seconds(workers: Collection[int]) -> float:
    """Of this process and the workers."""
    times = [psutil.Process(pid).cpu_times() for pid in workers]
    return time.process_time() + sum(t.user + t.system for t in times)


def children() -> set[int]:
    """Process ids."""
    return {child.pid for child in psutil.Process().children()}


@contextmanager
def looking_less_often() -> Iterator[None]:
    """The settings of the processes of a run, for the block."""
    thresholds = gc.get_threshold()
    look_less_often()
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


async def compare(url: str, tokens: int, words: argparse.Namespace) -> None:
    """All sides in turn, and their ratios."""
    settings = SamplingSettings(temperature=1.0, max_new_tokens=tokens)
    requests = max(words.concurrency, words.tokens // tokens)
    samples: list[Sample] = []
    async with AsyncExitStack() as stack:
        plain = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        session = await stack.enter_async_context(plain)
        sides = {"bare": bare(session, url, new_sample(0), settings)}
        pids: dict[str, set[int]] = {}
        for workers in [0, words.workers] if words.workers else [0]:
            name = f"ours, {workers} workers" if workers else "ours"
            limits = Limits(segment_tokens=tokens)
            connected = connect(
                [url], vocab_size=VOCABULARY, concurrency=words.concurrency, limits=limits, workers=workers
            )
            before = children()
            client = await stack.enter_async_context(connected)
            sides[name] = ours(client, settings, samples)
            pids[name] = children() - before
        found: dict[str, list[Rates]] = {}
        for number in range(words.runs + 1):
            for name, one in sides.items():
                # The first round opens the connections.
                count = requests if number else words.concurrency
                samples[:] = [new_sample(i) for i in range(count)]
                with looking_less_often():
                    rates = await timed(count, words.concurrency, one, pids.get(name, ()))
                if number:
                    found.setdefault(name, []).append(rates)
            if number:
                own = await timed(requests, words.concurrency, sides["bare"])
                found.setdefault(OWN_SETTINGS, []).append(own)
    print(f"{tokens} tokens: {requests} requests a round, {words.concurrency} at once, {words.runs} rounds")
    width = max(map(len, found))
    for name, rates_of in found.items():
        cpu, wall = zip(*rates_of, strict=True)
        print(f"  {name:{width}s} requests per CPU second {spread(cpu, 0)}, per second {spread(wall, 0)}")
    for name in pids:
        for other in ("bare", OWN_SETTINGS):
            for kind, place in (("CPU time", 0), ("time", 1)):
                ratios = [o[place] / b[place] for o, b in zip(found[name], found[other], strict=True)]
                print(f"  {name} / {other} by {kind}: {spread(ratios)}")


async def soak(url: str, tokens: int, words: argparse.Namespace) -> None:
    """Resident memory over time."""
    settings = SamplingSettings(temperature=1.0, max_new_tokens=tokens)
    process, began = psutil.Process(), time.monotonic()
    times: list[float] = []
    sizes: list[float] = []
    done = 0
    limits = Limits(segment_tokens=tokens)
    async with connect([url], vocab_size=VOCABULARY, concurrency=words.concurrency, limits=limits) as client:

        async def work(number: int) -> None:
            nonlocal done
            while time.monotonic() - began < words.soak:
                await client.generate([new_sample(number)], settings)
                number += words.concurrency
                done += 1

        async def look() -> None:
            while time.monotonic() - began < words.soak:
                await asyncio.sleep(min(1.0, words.soak / 60))
                times.append(time.monotonic() - began)
                sizes.append(process.memory_info().rss / 2**20)

        await asyncio.gather(look(), *(work(i) for i in range(words.concurrency)))
    kept = [i for i, t in enumerate(times) if t >= words.soak / 4]
    t, mib = np.array([times[i] for i in kept]), np.array([sizes[i] for i in kept])
    slope, _ = np.polyfit(t, mib, 1)
    halves = statistics.mean(mib[: len(mib) // 2]), statistics.mean(mib[len(mib) // 2 :])
    print(f"soak: {done} requests of {tokens} tokens in {words.soak:g} s, {words.concurrency} at once")
    print(f"  resident {mib.min():.1f} .. {mib.max():.1f} MiB, slope {slope * 60:+.2f} MiB/min")
    print(f"  mean of the first half {halves[0]:.1f} MiB, of the second {halves[1]:.1f} MiB")


def started(tokens: int) -> tuple[subprocess.Popen[str], str]:
    """A server in a process of its own, and its URL."""
    command = [sys.executable, __file__, "--serve", str(tokens)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    return server, f"http://127.0.0.1:{int(server.stdout.readline())}"


def main() -> int:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 8192], help="tokens of a response")
    parser.add_argument("--concurrency", type=int, default=512, help="requests in flight")
    parser.add_argument("--runs", type=int, default=5, help="rounds of each side")
    parser.add_argument("--tokens", type=int, default=2_000_000, help="tokens of a round, about")
    parser.add_argument("--workers", type=int, default=0, help="also through so many worker processes")
    parser.add_argument("--soak", type=float, default=0.0, help="seconds of the soak; 0 = none, then both are compared")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.serve:
        asyncio.run(serve(words.serve))
    print(load_average())
    for tokens in words.lengths[:1] if words.soak else words.lengths:
        server, url = started(tokens)
        try:
            asyncio.run(soak(url, tokens, words) if words.soak else compare(url, tokens, words))
        finally:
            server.kill()
            server.wait()
    print(load_average())
    return 0


if __name__ == "__main__":
    sys.exit(main())
