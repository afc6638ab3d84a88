"""Writes a run directory that looks like a real run of the quickstart, for tests of what reads one; runs no training.

`python -m tests.synthetic_run OUT [--steps 60] [--scenario finished|running|collapse]` writes one to look at.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from megatron_rl.monitor.metrics_log import METRICS_FILE, MetricsLog
from megatron_rl.monitor.result import RunResult

HOSTILE = (
    "</script><script>window.hacked = true</script><img src=x onerror='window.hacked = true'><b>bold</b> & "
    "<!-- comment <answer>1 2 3 4</answer> \u2028 \u202e right to left \x00 {{ 7 * 7 }} {% raw %}"
)
"""A response that no page may execute, or let change its layout."""

CONFIG: dict[str, Any] = {
    "name": "quickstart",
    "run_dir": "runs/quickstart",
    "seed": 0,
    "steps": 60,
    "model": {"path": "runs/quickstart/model", "dtype": "float32"},
    "parallel": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 1, "data_parallel_size": 1},
    "optimizer": {"lr": 2e-4, "clip_grad": 1.0},
    "algorithm": {"preset": "dapo", "advantage": "grpo", "eps_low": 0.2, "eps_high": 0.28, "kl_coef": 0.001},
    "rollout": {"groups_per_step": 16, "group_size": 8, "max_response_tokens": 32, "dynamic_sampling": "refill"},
    "reward": {
        "components": [{"name": "sorting", "weight": 1.0, "correctness": True}, {"name": "format", "weight": 0.1}]
    },
    "eval": {"every": 10, "prompts": 256, "samples_per_prompt": 4, "ks": [1, 2, 4]},
}


def write_run(
    path: str | Path,
    *,
    steps: int = 60,
    scenario: str = "finished",
    sft_steps: int = 24,
    groups: int = 4,
    group_size: int = 8,
    eval_prompts: int = 24,
    dump_every: int = 1,
    seed: int = 0,
) -> Path:
    """Write config, metrics, rollouts, evaluations and (when finished) the result to `path` and return it."""
    path, rng = Path(path), random.Random(seed)
    path.mkdir(parents=True, exist_ok=True)
    config = {**CONFIG, "steps": steps if scenario == "finished" else 2 * steps, "run_dir": str(path)}
    (path / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False), "utf-8")
    log = MetricsLog(path / METRICS_FILE)
    for step in range(1, sft_steps + 1):
        log.write(0, sft_row(step, sft_steps, rng))
    log.write(0, eval_row(0.07))
    for step in range(1, steps + 1):
        skill = skill_at(step, steps)
        row = step_row(step, skill, rng, collapse=scenario == "collapse" and step > steps // 2)
        if step % 10 == 0 or step == steps:
            row |= eval_row(skill) | {"time/eval": 0.9}
            row["time/step"] += 0.9
            write_dump(path / "eval", step, eval_prompts, 1, skill, rng)
        log.write(step, row)
        if step % dump_every == 0:
            write_dump(path / "rollouts", step, groups, group_size, skill, rng, hostile=step == steps)
    log.close()
    write_dump(path / "eval", 0, eval_prompts, 1, 0.07, rng)
    if scenario == "finished":
        before, after = eval_row(0.07), eval_row(skill_at(steps, steps))
        RunResult.from_evaluations(before, after, train_seconds=163.4, steps=steps, seed=0, run_dir=path).write()
    return path


def skill_at(step: int, steps: int) -> float:
    """Held-out pass@1 of an ordinary run: slow, fast, levelling off."""
    return 0.07 + 0.82 / (1 + math.exp(-10 * (step / steps - 0.42)))


def sft_row(step: int, steps: int, rng: random.Random) -> dict[str, float]:
    row = {"sft/step": float(step), "sft/loss": 3.2 * math.exp(-4 * step / steps) + 0.9 + rng.gauss(0, 0.03)}
    return row | ({"sft/format_valid": min(0.97, 1.05 * step / steps)} if step % 6 == 0 else {})


def eval_row(skill: float) -> dict[str, float]:
    row = {"eval/format_valid": 0.92 + 0.07 * skill, "eval/response_length_mean": 14.0 + skill}
    for k in (1, 2, 4):
        share = 1 - (1 - skill) ** (0.85 * k if k > 1 else 1)
        half = 1.96 * math.sqrt(max(share * (1 - share), 1e-4) / 256)
        name = f"eval/pass_at_{k}"
        row |= {name: share, f"{name}_low": max(0.0, share - half), f"{name}_high": min(1.0, share + half)}
    return row


def step_row(step: int, skill: float, rng: random.Random, collapse: bool = False) -> dict[str, Any]:
    noise = lambda scale: rng.gauss(0, scale)  # noqa: E731
    correctness = min(1.0, max(0.0, skill + noise(0.04)))
    entropy = max(0.01, 0.62 * (1.25 - skill) + noise(0.015))
    if collapse:
        correctness, entropy = 0.05 + abs(noise(0.02)), 0.02 + abs(noise(0.003))
    high, low = abs(noise(0.006)) + 0.012, abs(noise(0.004)) + 0.006
    dropped = min(0.95, 0.15 + 0.5 * abs(skill - 0.4) + abs(noise(0.05)))
    times = {"generate": 0.95 + noise(0.06), "pull": 0.03, "log_probs": 0.28 + noise(0.02), "train": 0.9 + noise(0.05)}
    times |= {"weights": 0.12 + abs(noise(0.02))}
    return {
        "reward/mean": correctness + 0.1 * 0.95,
        "reward/std": 0.45 + noise(0.02),
        "reward/correctness": correctness,
        "reward/sorting": correctness,
        "reward/format": 0.95 + noise(0.01),
        "rollout/response_length_mean": 14.2 + 1.2 * skill + noise(0.15),
        "rollout/response_length_max": 18.0 + rng.randrange(6),
        "rollout/truncated_fraction": max(0.0, 0.03 * (1 - skill) + noise(0.004)),
        "rollout/groups_dropped_fraction": dropped,
        "rollout/groups_generated": round(16 / (1 - dropped)),
        "rollout/sample_rounds": 1 + (dropped > 0.5),
        "policy/loss": noise(0.01),
        "policy/entropy": entropy,
        "policy/clip_fraction": high + low,
        "policy/clip_fraction_high": high,
        "policy/clip_fraction_low": low,
        "policy/ratio_mean": 1 + noise(0.001),
        "policy/kl_reference": 0.004 * step * (1 + noise(0.05)),
        "policy/kl_old": abs(noise(0.0005)),
        "optimizer/grad_norm": float("nan") if step == 7 else abs(0.55 - 0.3 * skill + noise(0.06)),
        "optimizer/lr": 2e-4 * min(1.0, step / 5),
        "gap/mean_abs": 2e-6 + abs(noise(4e-7)),
        "gap/max_abs": 3e-5 + abs(noise(4e-6)),
        "gap/kl_k3": 1e-9,
        "system/tokens_per_second": 760 + noise(30),
        "system/rss_gib": 1.1,
        "time/step": sum(times.values()) + 0.06,
        **{f"time/{name}": seconds for name, seconds in times.items()},
    }


def write_dump(
    folder: Path, step: int, groups: int, size: int, skill: float, rng: random.Random, *, hostile: bool = False
) -> Path:
    """One Parquet dump of `groups` x `size` samples with the columns of a real one."""
    rows = [_sample(step, group, index, skill, rng) for group in range(groups) for index in range(size)]
    if hostile:
        # The lowest and the highest reward of the step, so that a selection spread over rewards holds both.
        rows[0] |= {"response": HOSTILE, "prompt": HOSTILE, "sample_id": "</script>", "reward": -0.5}
        rows[1] |= {"response": "long " * 20000, "finish_reason": "length", "reward": 1.6}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{step:06d}.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def _sample(step: int, group: int, index: int, skill: float, rng: random.Random) -> dict[str, Any]:
    prompt_rng = random.Random(1000 * step + group)
    digits = [str(prompt_rng.randrange(10)) for _ in range(4)]
    prompt = (
        f"<|im_start|>user\nSort these digits in ascending order: {' '.join(digits)}<|im_end|>\n<|im_start|>assistant\n"
    )
    right = rng.random() < skill
    guess = sorted(digits) if right else rng.sample(digits, len(digits))
    correct = float(guess == sorted(digits))
    valid = rng.random() < 0.95
    thought = f"<think>smallest first: {min(digits)}</think>\n"
    response = f"{thought}<answer>{' '.join(guess)}</answer>" if valid else f"{' '.join(guess)} {' '.join(guess)}"
    return {
        "step": step,
        "sample_id": f"{step:06d}-{group:04d}-{index:02d}.",
        "group_id": f"{step:06d}-{group:04d}",
        "prompt_id": f"sort-{1000 * step + group:05d}",
        "source": "sort-4",
        "prompt": prompt,
        "response": response,
        "answer": " ".join(sorted(digits)),
        "reward": correct + (0.1 if valid else 0.0),
        "correctness": correct,
        "components": json.dumps({"sorting": correct, "format": 1.0 if valid else 0.0}),
        "response_tokens": len(response) // 2,
        "finish_reason": "stop" if valid else "length",
        "trained": group % 4 != 3,
        "weight_version_first": max(0, step - 1),
        "weight_version_last": max(0, step - 1),
        "log_prob_mean": -0.4 - rng.random() * 0.3,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--scenario", choices=("finished", "running", "collapse"), default="finished")
    arguments = parser.parse_args()
    print(write_run(arguments.out, steps=arguments.steps, scenario=arguments.scenario))
