"""TRL's side of `bench_step.py`: some RL steps with GRPOTrainer, in TRL's own environment; nothing of ours is imported.

    python bench_step_trl.py SPEC.json OUT.json

SPEC: model, prompts, answers, steps, updates, group_size, samples, max_new_tokens, lr, seed, per_device_batch,
continuous_batching. OUT: when each RL step ended, seconds since the epoch, and the mean response length.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any


def main(spec: dict[str, Any]) -> dict[str, Any]:
    """Train; an RL step is `updates` optimizer steps on one batch of rollouts."""
    # By name: neither is a dependency of this project.
    trl, datasets = importlib.import_module("trl"), importlib.import_module("datasets")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    ends: list[float] = []
    lengths: list[int] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.time())

    def reward(completions: list[str], answer: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        lengths.extend(len(ids) for ids in completion_ids)
        return [float(text == wanted) for text, wanted in zip(completions, answer, strict=True)]

    per_update = spec["samples"] // spec["updates"]
    accumulate = per_update // spec["per_device_batch"]
    trainer = trl.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(spec["model"]),
        reward_funcs=reward,
        train_dataset=datasets.Dataset.from_dict({"prompt": spec["prompts"], "answer": spec["answers"]}),
        callbacks=[Clock()],
        args=trl.GRPOConfig(
            output_dir=spec["output_dir"],
            use_cpu=True,
            bf16=False,
            seed=spec["seed"],
            max_steps=spec["steps"] * spec["updates"],
            per_device_train_batch_size=spec["per_device_batch"],
            gradient_accumulation_steps=accumulate,
            steps_per_generation=accumulate * spec["updates"],
            num_iterations=1,
            num_generations=spec["group_size"],
            max_completion_length=spec["max_new_tokens"],
            temperature=1.0,
            beta=0.0,
            epsilon=0.2,
            epsilon_high=0.28,
            loss_type="dapo",
            learning_rate=spec["lr"],
            lr_scheduler_type="constant",
            max_grad_norm=1.0,
            gradient_checkpointing=False,  # on by default: it would only cost time here
            use_transformers_continuous_batching=spec["continuous_batching"],
            # By default its cache takes half of the memory, and filling that takes most of the time.
            transformers_continuous_batching_config={"num_blocks": 1024, "max_batch_tokens": 2048},
            dataloader_pin_memory=False,
            disable_tqdm=True,
            logging_steps=spec["updates"],
            report_to="none",
            save_strategy="no",
        ),
    )
    trainer.train()
    steps = ends[spec["updates"] - 1 :: spec["updates"]]
    return {"ends": steps, "response_length": sum(lengths) / len(lengths)}


if __name__ == "__main__":
    found = main(json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(found))
