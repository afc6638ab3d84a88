#!/usr/bin/env python3
"""How far GSPO's ratios of a tiny mixture of experts scatter as it is updated, with routing replay off, R2 and R3.

For each seed and number format of the engine: a tiny Qwen3-MoE learns the format of an answer (sort digits), an engine
(transformers, fp32 or bf16, the same weights) samples responses and says which experts it used, and the trainer
(Megatron-Core, fp32) makes updates of GSPO on parts of this batch. Before the first update and after some, log-probs of
the whole batch are computed three times with the same weights: experts chosen live (off), those that the trainer chose
before the first update (R2), those of the engine (R3). Replay is thus the only difference between columns of the table.

    python tools/study_moe_ratio.py --plot docs/images/moe_ratio.svg
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megatron_rl.algorithms.advantages import compute_advantages  # noqa: E402
from megatron_rl.algorithms.normalisation import token_weights  # noqa: E402
from megatron_rl.algorithms.spec import AdvantageSpec, LossSpec  # noqa: E402
from megatron_rl.config import Config, load_config  # noqa: E402
from megatron_rl.data import PromptDataset, PromptTokenizer  # noqa: E402
from megatron_rl.data.quickstart import Quickstart, write_quickstart  # noqa: E402
from tools.study_table import Row, Table, draw, print_spread, print_table  # noqa: E402

if TYPE_CHECKING:
    import torch

    from megatron_rl.policy.batch import Routes, SequenceBatch
    from megatron_rl.policy.policy import LogProbs, Policy

UPDATES = 8
MEASURED = (0, 1, 2, 4, 8)
ENGINES = ("float32", "bfloat16")
MODES = ("off", "R2", "R3")


@dataclass(frozen=True)
class Sampled:
    """What an engine returned: sequences end to end, its log-probs, its experts, and the advantages of the answers."""

    batch: SequenceBatch
    routes: Routes
    groups: np.ndarray
    """int64 [S], prompt of each sequence."""


def main() -> int:
    """Print the table, and write the plot if one is asked for."""
    arguments = _arguments()
    for kind in (UserWarning, FutureWarning):  # of packages that only a GPU needs, and of torch to Megatron
        warnings.simplefilter("ignore", kind)
    table: Table = {}
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="study-moe-") as folder:
        _start(Path(folder))
        for seed in range(arguments.seeds):
            work = Path(folder) / f"seed-{seed}"
            _warm_up(arguments, seed, work)
            for engine, rate in itertools.product(ENGINES, arguments.lr):
                for (mode, update), row in _measure(arguments, seed, work, engine, rate):
                    table.setdefault((engine, rate, update, mode), []).append(row)
                print(f"seed {seed}, engine in {engine}, rate {rate:g}: measured", file=sys.stderr, flush=True)
    print(
        f"{arguments.experts} experts, 2 of them a token; {arguments.prompts} x {arguments.group_size} responses of "
        f"{arguments.digits + 1} tokens; {arguments.seeds} seeds; {time.monotonic() - began:.0f} s"
    )
    print_table(table)
    print_spread(table)
    if arguments.plot:
        draw(table, arguments.plot)
        print(f"plot: {arguments.plot}")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="(default 3)")
    parser.add_argument("--experts", type=int, default=8, help="of each layer (default 8)")
    parser.add_argument("--prompts", type=int, default=16, help="of the batch (default 16)")
    parser.add_argument("--group-size", type=int, default=16, help="responses to each (default 16)")
    parser.add_argument("--digits", type=int, default=12, help="to sort; responses are one token longer (default 12)")
    parser.add_argument("--warm-up", type=int, default=150, help="supervised steps before (default 150)")
    rates, words = [1e-6, 1e-5, 1e-4], "learning rates of the updates (default 1e-6 1e-5 1e-4)"
    parser.add_argument("--lr", type=float, nargs="+", default=rates, help=words)
    parser.add_argument("--plot", type=Path, help="SVG file to write")
    return parser.parse_args()


def _start(folder: Path) -> None:
    """This process is the only trainer rank."""
    importlib.import_module("transformers.generation.utils")  # cannot be imported beside stand-ins for torch.cuda
    importlib.import_module("transformers.utils.logging").disable_progress_bar()
    from megatron_rl.addresses import free_port
    from megatron_rl.cluster.bootstrap import find_place
    from megatron_rl.config.parallel import ParallelConfig
    from megatron_rl.policy import distributed

    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    os.environ.update(alone, MASTER_PORT=str(free_port()))
    distributed.initialize(find_place(os.environ, folder), ParallelConfig(), seed=1, timeout_s=600, device="cpu")


def _config(arguments: argparse.Namespace, seed: int, work: Path, model: Path) -> Config:
    words = [
        f"run_dir={work}/run",
        f"vars.inputs={work}/inputs",
        f"model.path={model}",
        f"seed={seed}",
        "parallel.tensor_model_parallel_size=1",
        "parallel.sequence_parallel=false",
        "parallel.expert_model_parallel_size=1",
        f"rollout.max_prompt_tokens={arguments.digits + 4}",
        f"rollout.max_response_tokens={arguments.digits + 1}",
        f"sft.max_steps={arguments.warm_up}",
    ]
    return load_config(ROOT / "configs" / "tiny_moe_gspo.yaml", words)


def _warm_up(arguments: argparse.Namespace, seed: int, work: Path) -> None:
    """Leave a model that knows the format of an answer in `work`/model."""
    import shutil

    from safetensors.torch import save_file

    from megatron_rl.feed import sft_batches
    from megatron_rl.policy.policy import Policy
    from megatron_rl.weights.export import export_hf_weights

    what = Quickstart(seed=seed, digits=arguments.digits, prompts=2048, eval_prompts=16, experts=arguments.experts)
    write_quickstart(work / "inputs", what)
    cfg = _config(arguments, seed, work, work / "inputs" / "model")
    policy = Policy.build(cfg)
    for batch, plan in sft_batches(cfg):
        policy.sft_step(batch, plan, cfg.sft.lr)
    shutil.copytree(work / "inputs" / "model", work / "model")
    weights = {name: tensor.clone() for name, tensor in export_hf_weights(policy.chunks, policy.hf)}
    save_file(weights, work / "model" / "model.safetensors", metadata={"format": "pt"})


def _measure(
    arguments: argparse.Namespace, seed: int, work: Path, engine: str, rate: float
) -> Iterator[tuple[tuple[str, int], Row]]:
    """Rows by (mode, updates made)."""
    from megatron_rl.policy.policy import Policy
    from megatron_rl.policy.step_batch import plan_lengths

    cfg = _config(arguments, seed, work, work / "model")
    policy = Policy.build(cfg)
    policy.set_learning_rate(rate)
    sampled = _sample(arguments, seed, cfg, engine)
    sets = {"off": None, "R2": _log_probs(policy, cfg, sampled.batch, None).old_routes, "R3": sampled.routes}
    old = {mode: _log_probs(policy, cfg, sampled.batch, sets[mode]).log_probs for mode in MODES}
    training = sampled.batch.with_arrays(old_log_probs=old["R3"], routes=sampled.routes)
    parts = np.array_split(np.unique(sampled.groups), UPDATES)
    for update in range(UPDATES + 1):
        if update:
            part = training.select(np.flatnonzero(np.isin(sampled.groups, parts[update - 1])))
            policy.train_step(_weighted(part), plan_lengths(part.lengths, cfg), LossSpec.from_config(cfg.algorithm))
        for mode in MODES if update in MEASURED else ():
            now = _log_probs(policy, cfg, sampled.batch, sets[mode])
            yield (mode, update), _row(sampled.batch, now, old[mode])


def _log_probs(policy: Policy, cfg: Config, batch: SequenceBatch, routes: Routes | None) -> LogProbs:
    """As the trainer computes them, with the experts that `routes` names; None: with those that it chooses itself."""
    from megatron_rl.policy.step_batch import plan_lengths

    return policy.log_probs(batch.with_arrays(routes=routes), plan_lengths(batch.lengths, cfg))


def _row(batch: SequenceBatch, found: LogProbs, old: np.ndarray) -> Row:
    now = found.log_probs.astype(np.float64)
    difference = np.where(batch.mask, now - old, 0.0)
    sequences = np.add.reduceat(difference, batch.offsets[:-1]) / batch.trainable_counts
    ratios = np.exp(sequences)
    assert batch.behaviour_log_probs is not None
    gap = np.abs(now - batch.behaviour_log_probs)[batch.mask]
    shares = found.routing_mismatch
    return Row(
        token_std=float(difference[batch.mask].std()),
        sequence_std=float(sequences.std()),
        clipped=float(((ratios < 1 - 3e-4) | (ratios > 1 + 4e-4)).mean()),
        gap=float(gap.mean()),
        mismatch=0.0 if shares is None else float(np.average(shares, weights=batch.lengths - 1)),
    )


def _weighted(batch: SequenceBatch) -> SequenceBatch:
    """With GSPO's weights: the mean over sequences of their tokens' mean."""
    weights = token_weights("seq_mean_token_mean", batch.trainable_counts)
    per_token = np.repeat(weights, batch.lengths).astype(np.float32)
    return batch.with_arrays(weights=np.where(batch.mask, per_token, np.float32(0)))


def _sample(arguments: argparse.Namespace, seed: int, cfg: Config, dtype: str) -> Sampled:
    """Responses of the engine to the first prompts, at temperature 1."""
    import torch
    from transformers import AutoModelForCausalLM

    from megatron_rl.policy.batch import SequenceBatch

    model = AutoModelForCausalLM.from_pretrained(cfg.model.path, dtype=getattr(torch, dtype)).eval()
    tokenizer = PromptTokenizer(cfg.model.path)
    records = [PromptDataset.load(cfg.data.prompts)[i] for i in range(arguments.prompts)]
    prompts = [tokenizer.encode(record) for record in records for _ in range(arguments.group_size)]
    torch.manual_seed(1000 + seed)
    with torch.no_grad():
        tokens = model.generate(
            torch.tensor(prompts), do_sample=True, top_k=0, max_new_tokens=cfg.rollout.max_response_tokens
        )
        outputs = model(tokens, output_router_logits=True)
    start, end_id = len(prompts[0]), tokenizer.eos_token_ids[0]
    lengths = [_length(row, start, end_id) for row in tokens.tolist()]
    log_probs = outputs.logits[:, :-1].float().log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0].numpy()
    padded = np.pad(log_probs, ((0, 0), (1, 0))).astype(np.float32)
    answers = [tokenizer.encode_text(record.answer or "") for record in records for _ in range(arguments.group_size)]
    rewards = [_reward(row[start:], answer) for row, answer in zip(tokens.tolist(), answers, strict=True)]
    groups = np.repeat(np.arange(arguments.prompts), arguments.group_size)
    advantages = compute_advantages(rewards, groups, lengths, np.ones(len(groups), bool), AdvantageSpec())
    rows = [row[:length] for row, length in zip(tokens.tolist(), lengths, strict=True)]
    batch = SequenceBatch.from_sequences(
        rows,
        [np.arange(length) >= start for length in lengths],
        [f"s{i}" for i in range(len(rows))],
        advantages=np.repeat(advantages, lengths).astype(np.float32),
        behaviour_log_probs=np.concatenate([padded[i, :length] for i, length in enumerate(lengths)]),
    )
    return Sampled(batch, _routes(outputs.router_logits, lengths, batch.offsets), groups)


def _length(row: list[int], start: int, end_id: int) -> int:
    """Tokens of prompt and response, its end included."""
    return row.index(end_id, start) + 1 if end_id in row[start:] else len(row)


def _reward(response: list[int], answer: list[int]) -> float:
    """Share of the digits that are where they belong."""
    return float(np.mean([given == right for given, right in zip(response, answer, strict=False)]))


def _routes(router_logits: tuple[torch.Tensor, ...], lengths: list[int], offsets: np.ndarray) -> Routes:
    """The engine's experts of every token that was read: all but the last one of a sequence."""
    from megatron_rl.policy.routes import ArrayRoutes

    width = router_logits[0].shape[0] // len(lengths)
    chosen = np.stack([logits.topk(2, dim=-1).indices.numpy() for logits in router_logits])  # [layers, tokens, top-k]
    chosen = chosen.reshape(len(router_logits), len(lengths), width, 2)
    read = [chosen[:, i, : length - 1] for i, length in enumerate(lengths)]
    places = np.concatenate(
        [start + np.arange(length - 1) for start, length in zip(offsets[:-1], lengths, strict=True)]
    )
    values = np.concatenate(read, axis=1).astype(np.int16)
    return ArrayRoutes(range(len(router_logits)), offsets, places.astype(np.int64), values)


if __name__ == "__main__":
    sys.exit(main())
