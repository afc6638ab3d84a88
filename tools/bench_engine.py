#!/usr/bin/env python3
"""Tokens per second with log-probs, on the CPU: the embedded engine over HTTP against transformers.generate.

Two loads, each of the same groups of prompts on both sides, sampled at temperature 1 from the full distribution:

- uniform: every response has the same length;
- long-tailed: lengths are drawn from an exponential distribution, cut at `--longest`, as real answers are.

Lengths are imposed (end-of-sequence tokens are ignored), so that both sides generate the same number of tokens; only
tokens within a response's length count. transformers gets the fastest of some batch sizes for each load, found first;
a batch ends when its longest response does. Log-probs are those of the sampled tokens, log_softmax in fp32, on both
sides. Loading is not counted, HTTP is. Runs alternate. CPU seconds (of the server; of transformers' process) are shown
beside the time, since other work on the machine hardly changes them.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import torch
import transformers

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megatron_rl.data import PromptDataset, PromptTokenizer  # noqa: E402
from megatron_rl.data.quickstart import Quickstart, write_quickstart  # noqa: E402
from tools.bench_common import BenchError, Engine, load_average, running_engines, spread  # noqa: E402

BATCH_SIZES = (16, 32, 64, 128, 256, 512)


@dataclass(frozen=True)
class Load:
    """What is to be generated: one prompt and one length for each sequence, groups in order."""

    prompts: list[list[int]]
    lengths: list[int]

    @property
    def tokens(self) -> int:
        """Tokens that count."""
        return sum(self.lengths)


@dataclass(frozen=True)
class Cost:
    """Of generating one load."""

    seconds: float
    cpu_seconds: float


def main() -> int:
    """Print tokens per second and ratios; 1 with an explanation when a side cannot be run."""
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    transformers.utils.logging.disable_progress_bar()
    try:
        with tempfile.TemporaryDirectory(prefix="bench-engine-") as name:
            folder = Path(name)
            write_quickstart(folder / "inputs", Quickstart(prompts=max(512, arguments.groups)))
            model = arguments.model or folder / "inputs" / "model"
            words = ("--num-threads", str(arguments.threads), "--max-running-requests", "512")
            with running_engines(model, folder, 1, *words) as (server,):
                _compare(arguments, _loads(arguments, folder / "inputs", model), model, server)
    except (BenchError, OSError) as error:
        print(f"bench_engine: {error}", file=sys.stderr)
        return 1
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="Hugging Face directory (default: the quickstart's model, fp32)")
    parser.add_argument("--runs", type=int, default=5, help="interleaved runs of each side (default 5)")
    parser.add_argument("--groups", type=int, default=32, help="prompts (default 32)")
    parser.add_argument("--group-size", type=int, default=16, help="samples of a prompt (default 16)")
    parser.add_argument("--length", type=int, default=64, help="response length of the uniform load (default 64)")
    parser.add_argument("--mean", type=int, default=32, help="mean length of the long-tailed load (default 32)")
    parser.add_argument("--longest", type=int, default=224, help="longest response of it (default 224)")
    parser.add_argument("--threads", type=int, default=1, help="threads of each side (default 1)")
    return parser.parse_args()


def _loads(arguments: argparse.Namespace, inputs: Path, model: Path) -> dict[str, Load]:
    tokenizer = PromptTokenizer(model)
    records = PromptDataset.load(inputs / "train.jsonl")
    groups = [tokenizer.encode(records[i]) for i in range(arguments.groups)]
    prompts = [prompt for prompt in groups for _ in range(arguments.group_size)]
    drawn = np.random.default_rng(0).exponential(arguments.mean, size=len(prompts))
    long_tailed = np.clip(drawn.round(), 1, arguments.longest).astype(int).tolist()
    return {"uniform": Load(prompts, [arguments.length] * len(prompts)), "long-tailed": Load(prompts, long_tailed)}


def _compare(arguments: argparse.Namespace, loads: dict[str, Load], model: Path, server: Engine) -> None:
    theirs = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    theirs.generation_config.eos_token_id = None
    for name, load in loads.items():
        print(f"{name}: {len(load.prompts)} sequences, {load.tokens} tokens, {arguments.threads} thread(s); ", end="")
        print(load_average(), flush=True)
        sizes = [size for size in BATCH_SIZES if size <= len(load.prompts)] or [len(load.prompts)]
        tried = {size: _transformers(theirs, load, size) for size in sizes}
        best = min(tried, key=lambda size: tried[size].cpu_seconds)
        by_size = ", ".join(f"{size}: {load.tokens / cost.cpu_seconds:.0f}" for size, cost in tried.items())
        print(f"  transformers by batch size, tokens per CPU second: {by_size}")
        _engine_cost(server, load, arguments.group_size)  # warm, as transformers is by now
        ours, others = [], []
        for _ in range(arguments.runs):
            ours.append(_engine_cost(server, load, arguments.group_size))
            others.append(_transformers(theirs, load, best))
        for what, attribute in (("second", "seconds"), ("CPU second", "cpu_seconds")):
            rates = [[load.tokens / getattr(cost, attribute) for cost in costs] for costs in (ours, others)]
            ratio = statistics.median(rates[0]) / statistics.median(rates[1])
            print(f"  tokens per {what}: embedded engine {spread(rates[0], 0)}, ", end="")
            print(f"transformers (batch {best}) {spread(rates[1], 0)}; ours / transformers {ratio:.2f}", flush=True)
        print(f"  {load_average()}", flush=True)


# ------------------------------------------------------------------------------------------------------------ our side


def _engine_cost(server: Engine, load: Load, group_size: int) -> Cost:
    before = server.cpu_seconds()
    seconds = asyncio.run(_post_all(server.url, load, group_size))
    # The system counts whole ticks: a load of a few tokens may take less than one.
    return Cost(seconds, max(server.cpu_seconds() - before, 1 / os.sysconf("SC_CLK_TCK")))


async def _post_all(url: str, load: Load, group_size: int) -> float:
    """One request for each group, all at once, as the controller does."""
    bodies = [_body(load, slice(i, i + group_size)) for i in range(0, len(load.prompts), group_size)]
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(600)) as session:
        start = time.perf_counter()
        answers = await asyncio.gather(*(_post(session, url, body) for body in bodies))
        seconds = time.perf_counter() - start
    found = [len(one["meta_info"]["output_token_logprobs"]) for answer in answers for one in answer]
    if found != load.lengths:
        raise BenchError("the engine's answers do not have the lengths that were asked for")
    return seconds


def _body(load: Load, rows: slice) -> dict[str, Any]:
    settings = [{"max_new_tokens": n, "temperature": 1.0, "ignore_eos": True} for n in load.lengths[rows]]
    return {"input_ids": load.prompts[rows], "sampling_params": settings, "return_logprob": True}


async def _post(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Any:
    async with session.post(f"{url}/generate", json=body) as response:
        if response.status != 200:
            raise BenchError(f"the engine answered {response.status}: {(await response.text())[:500]}")
        return await response.json()


# -------------------------------------------------------------------------------------------------------- transformers


def _transformers(model: Any, load: Load, batch_size: int) -> Cost:
    """All batches, log-probs of the sampled tokens included."""
    start, cpu = time.perf_counter(), time.process_time()
    for first in range(0, len(load.prompts), batch_size):
        rows = slice(first, first + batch_size)
        _generate(model, load.prompts[rows], max(load.lengths[rows]))
    return Cost(time.perf_counter() - start, time.process_time() - cpu)


@torch.inference_mode()
def _generate(model: Any, prompts: list[list[int]], new_tokens: int) -> torch.Tensor:
    """Log-probs [batch, new_tokens] of what was sampled."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    attended = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    found = model.generate(
        input_ids=ids,
        attention_mask=attended,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=new_tokens,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    # A step at a time: the scores of all steps together would be copied once more.
    sampled = found.sequences[:, width:]
    columns = [
        torch.log_softmax(scores.float(), dim=-1).gather(1, sampled[:, step, None])[:, 0]
        for step, scores in enumerate(found.scores)
    ]
    log_probs = torch.stack(columns, dim=1)
    if log_probs.shape != (len(prompts), new_tokens):
        raise BenchError(f"transformers generated {tuple(log_probs.shape)} instead of {(len(prompts), new_tokens)}")
    return log_probs


if __name__ == "__main__":
    sys.exit(main())
