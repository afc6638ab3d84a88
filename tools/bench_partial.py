#!/usr/bin/env python3
"""Partial rollouts against synchronous ones on a long-tailed load: time of a step, and whether lengths stay unbiased.

Both sides run the real controller, scheduler and client against embedded engines over HTTP, in real time, with the
same prompts. The model is deep and narrow, so that a decoding step takes nearly as long for one sequence as for many,
as on a GPU. How long a response becomes is drawn when it begins, from a lognormal distribution whose 99th percentile
is `--tail` times its median, and hidden from the scheduler; end-of-sequence tokens do not exist. The trainer is
simulated: its part of a step takes no time, but the engines load new weights in every step, with all that belongs to
it. Only the steps from `--first` on count.

Printed are the time of a step and the engines' CPU time on either side, their ratio for equally many trained tokens,
and two-sample Kolmogorov-Smirnov tests of the lengths of all trained responses: partial rollouts against synchronous
ones, and each against fresh draws from the distribution. The lengths of both sides are drawn independently.

--biased throws away what unfinished responses have whenever a step is complete, so that long ones hardly ever finish:
a scheduler that does this must fail the test. The exit status is 1 when lengths are found to be biased.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import math
import secrets
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megatron_rl.config import Config, validate  # noqa: E402
from megatron_rl.data.quickstart import Quickstart, write_quickstart  # noqa: E402
from megatron_rl.rewards import RewardPool  # noqa: E402
from megatron_rl.rollout.connect import connect_run  # noqa: E402
from megatron_rl.rollout.control import EngineControl  # noqa: E402
from megatron_rl.rollout.controller import Controller, Prompts  # noqa: E402
from megatron_rl.rollout.endpoint import Endpoint, publish  # noqa: E402
from megatron_rl.rollout.protocol import EngineError, SamplingSettings  # noqa: E402
from megatron_rl.rollout.pull import ControllerClient, ControllerError  # noqa: E402
from megatron_rl.rollout.sample import Sample  # noqa: E402
from megatron_rl.rollout.server import build_app  # noqa: E402
from megatron_rl.rollout.wire import RolloutTable  # noqa: E402
from tools.bench_common import BenchError, Engine, load_average, running_engines, spread  # noqa: E402

STEP_S = 600.0
CONTEXT = 2048
PROMPT = 16
SIGNIFICANT = 0.01
"""Smallest p-value with which lengths pass for unbiased."""


@dataclass(frozen=True)
class Lengths:
    """Lognormal lengths, at least 1 and at most what the model's context holds.

    >>> drawn = Lengths(32, 8.0).draw(np.random.default_rng(0), 100_000)
    >>> round(float(np.quantile(drawn, 0.99) / np.quantile(drawn, 0.5)), 1)
    8.0
    """

    median: float
    tail: float
    """99th percentile over median."""

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """int64 [count]."""
        sigma = math.log(self.tail) / 2.3263479
        drawn = rng.lognormal(math.log(self.median), sigma, count).round()
        return np.clip(drawn, 1, CONTEXT - PROMPT).astype(np.int64)


class BudgetedEngines:
    """The real client, told for each sample how long it becomes: drawn anew whenever it begins with no token.

    Args:
        client: of the run.
        lengths: where they are drawn from.
        seed: of the draws.
        discards: throw away what an unfinished response has.
    """

    def __init__(self, client: Any, lengths: Lengths, seed: int, discards: bool) -> None:
        self._client, self._lengths, self._discards = client, lengths, discards
        self._rng = np.random.default_rng(seed)
        self._budgets: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def generate(self, samples: Sequence[Sample], settings: SamplingSettings) -> None:
        """As the client's."""
        for sample in samples:
            if not sample.response_length:
                self._budgets[sample.id] = int(self._lengths.draw(self._rng, 1)[0])
        each = [
            dataclasses.replace(settings, max_new_tokens=self._budgets[sample.id], stop_token_ids=())
            for sample in samples
        ]
        await self._client.generate(samples, each)
        if self._discards:
            for sample in samples:
                if not sample.finished:
                    fresh = Sample(sample.id, sample.group_id, sample.prompt_tokens, sample.temperature, sample.seed)
                    vars(sample).update(vars(fresh), attempts=sample.attempts)

    def suspend(self, groups: Collection[str]) -> None:
        """As the client's."""
        self._client.suspend(groups)


@dataclass
class Side:
    """What one side did in the steps that count."""

    seconds: list[float]
    """Of each step."""
    cpu_seconds: float
    """Of the engines, all steps together."""
    lengths: np.ndarray
    """Of all trained responses, int64."""
    ages: list[float]
    """Largest staleness of a trained token, by step."""

    @property
    def tokens(self) -> int:
        """Trained ones."""
        return int(self.lengths.sum())


def main() -> int:
    """Print both sides, ratio and tests; 1 when lengths are biased, or with an explanation when a side fails."""
    arguments = _arguments()
    lengths = Lengths(arguments.median, arguments.tail)
    try:
        with tempfile.TemporaryDirectory(prefix="bench-partial-") as name:
            folder = Path(name)
            model = _write_inputs(folder / "inputs", arguments.groups * 64, arguments.layers)
            words = ("--num-threads", "1", "--weight-version", "0", "--max-running-requests", "1024")
            with running_engines(model, folder, arguments.engines, *words) as servers:
                sides = {}
                for side in ("sync", "partial"):
                    cfg = _config(folder / side, folder / "inputs", [server.url for server in servers], side, arguments)
                    sides[side] = asyncio.run(_run(cfg, servers, lengths, side, arguments))
                    _print_side(side, sides[side])
        return _compare(sides["sync"], sides["partial"], lengths, arguments.seed)
    except (BenchError, ControllerError, EngineError, OSError) as error:
        print(f"bench_partial: {error}", file=sys.stderr)
        return 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=32, help="prompts of a step (default 32)")
    parser.add_argument("--group-size", type=int, default=4, help="samples of a prompt (default 4)")
    parser.add_argument("--median", type=float, default=64, help="median length of a response (default 64)")
    parser.add_argument("--tail", type=float, default=8.0, help="99th percentile over median (default 8)")
    parser.add_argument("--steps", type=int, default=20, help="steps of each side (default 20)")
    parser.add_argument("--first", type=int, default=5, help="first step that counts, from 1 (default 5)")
    parser.add_argument("--oversample", type=float, default=1.25, help="rollout.oversample of partial (default 1.25)")
    parser.add_argument("--layers", type=int, default=24, help="layers of the model (default 24)")
    parser.add_argument("--seed", type=int, default=0, help="of all draws (default 0)")
    parser.add_argument("--engines", type=int, default=2, help="replicas, of one thread each (default 2)")
    parser.add_argument("--biased", action="store_true", help="throw away what unfinished responses have")
    return parser.parse_args()


def _write_inputs(inputs: Path, prompts: int, layers: int) -> Path:
    """The quickstart's prompts and tokenizer, and a deep, narrow model without an end of sequence."""
    import transformers

    write_quickstart(inputs, Quickstart(prompts=min(prompts, 4096)))
    folder = inputs / "model"
    config = transformers.AutoConfig.from_pretrained(folder)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": layers, "head_dim": 8}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "layer_types": None}
    wanted = config.to_dict() | sizes | heads | {"max_position_embeddings": CONTEXT, "eos_token_id": None}
    transformers.utils.logging.disable_progress_bar()
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**wanted))
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    return folder


def _config(run_dir: Path, inputs: Path, urls: list[str], side: str, arguments: argparse.Namespace) -> Config:
    """Staleness only bounds how many groups are alive here: nothing is dropped by age."""
    partial = {
        "partial_rollouts": True,
        "oversample": arguments.oversample,
        "max_staleness": 2,
        "stale_policy": "keep_with_correction",
    }
    return validate(
        {
            "run_dir": str(run_dir),
            "seed": arguments.seed,
            "steps": arguments.steps,
            "model": {"path": str(inputs / "model"), "dtype": "float32"},
            "algorithm": {"max_tokens_per_microbatch": CONTEXT, "corrections": ["tis"] if side == "partial" else []},
            "data": {"prompts": str(inputs / "train.jsonl")},
            "engine": {"urls": urls},
            "reward": {"components": [{"name": "sorting", "correctness": True}], "workers": 1},
            "logging": {"dump_rollouts": False},
            "rollout": {
                "groups_per_step": arguments.groups,
                "group_size": arguments.group_size,
                "max_prompt_tokens": PROMPT,
                "max_response_tokens": CONTEXT - PROMPT,
                "dynamic_sampling": "off",
                "concurrency": 4096,
                "request_timeout_s": STEP_S,
                "step_timeout_s": STEP_S,
                **(partial if side == "partial" else {}),
            },
        }
    )


async def _run(
    cfg: Config, servers: Sequence[Engine], lengths: Lengths, side: str, arguments: argparse.Namespace
) -> Side:
    """The controller in this event loop, the trainer in a thread; each side has draws of its own."""
    print(
        f"{side}: {cfg.rollout.groups_per_step} x {cfg.rollout.group_size} responses a step; {load_average()}",
        flush=True,
    )
    biased, seed = arguments.biased and side == "partial", arguments.seed + (side == "partial")
    async with connect_run(cfg, [server.url for server in servers]) as client, RewardPool(cfg.reward) as verifiers:
        engines: Any = BudgetedEngines(client, lengths, seed, biased)
        controller = Controller(cfg, Prompts(cfg), engines, verifiers)
        token = secrets.token_urlsafe(16)
        runner = web.AppRunner(build_app(controller, token), access_log=None)
        await runner.setup()
        loops = asyncio.create_task(controller.run())
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            publish(cfg.run_dir, Endpoint(f"http://127.0.0.1:{runner.addresses[0][1]}", 0, token))
            return await asyncio.to_thread(_train, cfg, servers, arguments.first)
        finally:
            loops.cancel()
            await asyncio.gather(loops, return_exceptions=True)
            await runner.cleanup()


def _train(cfg: Config, servers: Sequence[Engine], first: int) -> Side:
    """The trainer's words to controller and engine, without any training."""
    controller = ControllerClient(cfg.run_dir)
    engines = EngineControl([server.url for server in servers], timeout_s=STEP_S)
    lengths, ages, seconds, cpu = [], [], [], 0.0
    engines.update_from_disk(cfg.model.path, 0)
    for step in range(cfg.steps):
        if step == first - 1:
            cpu = sum(server.cpu_seconds() for server in servers)
        began = time.perf_counter()
        controller.set_weights_version(step)
        controller.wait_ready(step, STEP_S)
        table = RolloutTable.from_bytes(controller.table(step))
        controller.wait_update(step + 1, STEP_S)
        engines.update_from_disk(cfg.model.path, step + 1)
        controller.done(step)
        if step >= first - 1:
            seconds.append(time.perf_counter() - began)
            lengths.append(np.asarray(table.response_length, np.int64))
            ages.append(float(step - np.asarray(table.version_first).min()))
    engines.close()
    return Side(seconds, sum(server.cpu_seconds() for server in servers) - cpu, np.concatenate(lengths), ages)


def _print_side(name: str, side: Side) -> None:
    quantiles = np.quantile(side.lengths, [0.5, 0.99, 1.0]).astype(int)
    print(
        f"  {spread(side.seconds)} s/step, {side.cpu_seconds / len(side.seconds):.2f} CPU s/step of the engines, "
        f"{sum(side.seconds):.1f} s for {side.tokens} trained tokens in {len(side.lengths)} responses"
    )
    print(
        f"  lengths: median {quantiles[0]}, 99th percentile {quantiles[1]}, longest {quantiles[2]}; "
        f"oldest token of a step {max(side.ages):.0f} versions",
        flush=True,
    )


def _compare(sync: Side, partial: Side, lengths: Lengths, seed: int) -> int:
    time_ratio = (sum(partial.seconds) / partial.tokens) / (sum(sync.seconds) / sync.tokens)
    cpu_ratio = (partial.cpu_seconds / partial.tokens) / (sync.cpu_seconds / sync.tokens)
    print(
        f"partial / sync: time {time_ratio:.2f}, engines' CPU time {cpu_ratio:.2f}, for equally many trained tokens; "
        f"of a step {sum(partial.seconds) / sum(sync.seconds):.2f}, its tokens {partial.tokens / sync.tokens:.3f}"
    )
    fresh = lengths.draw(np.random.default_rng(seed + 1000), max(len(sync.lengths), 2000))
    biased = False
    pairs = {
        "partial and sync": (partial.lengths, sync.lengths),
        "sync and fresh draws": (sync.lengths, fresh),
        "partial and fresh draws": (partial.lengths, fresh),
    }
    for what, (one, other) in pairs.items():
        distance, p = kolmogorov_smirnov(one, other)
        verdict = "the same distribution" if p > SIGNIFICANT else "NOT the same distribution"
        print(f"lengths of {what} ({len(one)} and {len(other)}): KS distance {distance:.4f}, p = {p:.3g}, {verdict}")
        biased = biased or p <= SIGNIFICANT
    return int(biased)


def kolmogorov_smirnov(one: np.ndarray, other: np.ndarray) -> tuple[float, float]:
    """Largest distance of two empirical distributions, and the asymptotic p-value that they are one.

    With ties, as lengths have them, the p-value is too large rather than too small (Noether 1963).

    >>> rng = np.random.default_rng(0)
    >>> kolmogorov_smirnov(rng.normal(size=2000), rng.normal(size=2000))[1] > 0.01
    True
    >>> kolmogorov_smirnov(rng.normal(size=2000), rng.normal(0.2, size=2000))[1] > 0.01
    False
    """
    values = np.union1d(one, other)
    shares = [np.searchsorted(np.sort(x), values, side="right") / len(x) for x in (one, other)]
    distance = float(np.abs(shares[0] - shares[1]).max())
    scaled = distance * math.sqrt(len(one) * len(other) / (len(one) + len(other)))
    terms = [2 * (-1) ** (k - 1) * math.exp(-2 * (k * scaled) ** 2) for k in range(1, 101)]
    return distance, min(1.0, max(0.0, sum(terms))) if scaled > 0.2 else 1.0


if __name__ == "__main__":
    sys.exit(main())
