#!/usr/bin/env python3
"""Bytes and CPU seconds of routes of experts: from an engine's answer to a trainer rank, against JSON in the same run.

- ours: an answer as SGLang gives it (int32 as base64 among tokens and log-probs) is read by the client, checked,
  written to a pack and read back, the layers of each of `--stages` pipeline stages by themselves;
- JSON: the same numbers as lists are read and turned into an array, as of a protocol without base64.

Rounds alternate; what is counted is CPU time of this process. The answer without its routes is timed, too, and taken
off. Below stand the bytes and CPU seconds of a whole step: `--sequences` of `--length` tokens.
"""

from __future__ import annotations

import argparse
import base64
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import orjson

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megatron_rl.rollout.answers import parse_generations  # noqa: E402
from megatron_rl.rollout.protocol import Prompt, SamplingSettings  # noqa: E402
from megatron_rl.rollout.routed import RouteFormat  # noqa: E402
from megatron_rl.routes import RoutePart  # noqa: E402
from tools.bench_common import load_average  # noqa: E402

VOCABULARY = 151_936
PROMPT = np.arange(16)


def routes_of(form: RouteFormat, tokens: int) -> np.ndarray:
    """int32 [tokens, layers, top_k]: different experts for every token and layer."""
    rng = np.random.default_rng(0)
    first = rng.integers(0, form.num_experts, (tokens, form.num_layers, 1))
    return ((first + np.arange(form.top_k) * 3) % form.num_experts).astype(np.int32)


def answer_of(routes: np.ndarray | None, generated: int) -> bytes:
    """One finished sequence, as SGLang 0.5.23 answers it."""
    ids = np.random.default_rng(0).integers(0, VOCABULARY, generated).tolist()
    meta = {
        "id": "r",
        "finish_reason": {"type": "length", "length": generated},
        "weight_versions": [{"version": "1", "start": 0, "end": generated}],
        "output_token_logprobs": [[-0.25, token, None] for token in ids],
    }
    if routes is not None:
        meta["routed_experts"] = base64.b64encode(routes.tobytes()).decode()
    return orjson.dumps([{"text": "", "output_ids": ids, "meta_info": meta}])


def seconds(call: Callable[[], object]) -> float:
    """CPU seconds of one call."""
    began = time.process_time()
    call()
    return time.process_time() - began


class Bench:
    """One answer of `tokens` tokens, through every step of its way."""

    def __init__(self, form: RouteFormat, tokens: int, stages: int) -> None:
        self._form, self._store = form, form.store()
        generated = tokens + 1 - len(PROMPT)  # the last token has no route
        settings = SamplingSettings(1.0, generated, routes="pack")
        self._prompt = Prompt("r", PROMPT, 0, generated, settings)
        self.routes = routes_of(form, tokens)
        self._body, self._bare = answer_of(self.routes, generated), answer_of(None, generated)
        self.json = orjson.dumps(self.routes.tolist())
        self.base64_bytes = len(self._body) - len(self._bare)
        self._layers = np.array_split(np.arange(len(form.moe_layers)), stages)
        self._part: RoutePart | None = None

    def decode(self) -> float:
        """The client reads the answer; less what it takes without routes."""
        plain = self._prompt._replace(settings=SamplingSettings(1.0, self._prompt.max_new_tokens))
        return seconds(lambda: self._parse(self._body, self._prompt)) - seconds(lambda: self._parse(self._bare, plain))

    def _parse(self, body: bytes, prompt: Prompt) -> np.ndarray | None:
        (found,) = parse_generations(body, [prompt], url="u", vocab_size=VOCABULARY, routes=self._form)
        return found.rows

    def write(self) -> float:
        """The client appends the rows to its pack."""
        rows = self._parse(self._body, self._prompt)
        assert rows is not None

        def append() -> None:
            self._part = self._store.append(rows, 0, "pack")

        return seconds(append)

    def read(self) -> float:
        """Every stage reads its layers, once."""
        part = self._part
        assert part is not None
        took = seconds(lambda: [self._store.read([part], layers, 0, part.rows) for layers in self._layers])
        (self._store.folder / part.file).unlink()
        return took

    def as_json(self) -> float:
        """A list of lists of lists: read and made an array of bytes."""
        return seconds(lambda: np.array(orjson.loads(self.json), np.uint8))

    @property
    def file_bytes(self) -> int:
        """Of one token on disk."""
        return self._store.bytes_per_token


def main() -> None:
    """Print both tables."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--layers", type=int, default=94, help="layers of the model, all with experts")
    words.add_argument("--top-k", type=int, default=8)
    words.add_argument("--experts", type=int, default=128, help="of a layer, 256 at most: JSON is read into bytes")
    words.add_argument("--stages", type=int, default=4, help="pipeline stages that read")
    words.add_argument("--tokens", type=int, default=2048, help="of the answer that is timed")
    words.add_argument("--sequences", type=int, default=2048, help="of a step")
    words.add_argument("--length", type=int, default=8192, help="tokens of one of them")
    words.add_argument("--rounds", type=int, default=5)
    words.add_argument("--folder", type=Path, default=None, help="where packs are written; default: a temporary one")
    args = words.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        form = RouteFormat(folder, args.layers, range(args.layers), args.top_k, args.experts)
        bench = Bench(form, args.tokens, args.stages)
        rounds = [(bench.decode(), bench.write(), bench.read(), bench.as_json()) for _ in range(args.rounds)]
    decode, write, read, as_json = (statistics.median(times) / args.tokens for times in zip(*rounds, strict=True))
    total = args.sequences * args.length
    print(f"{args.layers} layers x top-{args.top_k} of {args.experts} experts; {load_average()}")
    print(f"{'':24}{'bytes/token':>12}{'us CPU/token':>14}{'GB/step':>10}{'CPU s/step':>12}")
    for name, size, each in (
        ("JSON", len(bench.json) / args.tokens, as_json),
        ("answer: base64, checked", bench.base64_bytes / args.tokens, decode),
        ("pack: written", bench.file_bytes, write),
        ("pack: read", bench.file_bytes, read),
    ):
        print(f"{name:24}{size:12.0f}{each * 1e6:14.2f}{size * total / 1e9:10.1f}{each * total:12.1f}")
    ours = decode + write + read
    print(f"ours / JSON: CPU {ours / as_json:.3f}, bytes sent {bench.base64_bytes / len(bench.json):.2f}")
    numbers = args.layers * args.top_k
    print(f"a step is {args.sequences} sequences x {args.length} tokens: {ours * total:.0f} CPU s in all")
    print(f"that is {ours / numbers * 1e9:.1f} ns for each expert of each token and layer")


if __name__ == "__main__":
    main()
