"""A real pretrained model, SmolLM2-135M, on two pipeline stages: its log-probs, and two steps of the whole circle."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_rl.data import PromptTokenizer, TurnFrame
from megatron_rl.policy.batch import SequenceBatch
from tests.parallel.launch import run_ranks
from tests.parallel.policy_setup import PP2, layout, local_part, make_config

from .runs import ROOT, make_inputs, train

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1200)]
TEXTS = (
    "The quick brown fox jumps over the lazy dog, and then it goes home.",
    "To make 24 from 3, 5 and 7 one may try sums, differences and products of these numbers.",
    "def mean(values):\n    return sum(values) / len(values)\n",
    "Yes.",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the model in `model`."""
    folder = tmp_path_factory.mktemp("smollm2")
    tool = ROOT / "tools" / "fetch_smollm2.py"
    subprocess.run([sys.executable, str(tool), "--out", str(folder / "model")], check=True, timeout=400)
    return folder


def megatron_log_probs(path: str, batch: SequenceBatch) -> np.ndarray:
    """In a rank."""
    from megatron_rl.policy import distributed
    from megatron_rl.policy.policy import Policy

    cfg = make_config(path, PP2, model={"make_vocab_size_divisible_by": 1000})  # 49152 entries become 50000
    with layout(cfg) as dp_rank:
        policy = Policy.build(cfg)
        found = policy.log_probs(*local_part(batch, cfg, dp_rank)).log_probs
    distributed.shutdown()
    return found


def transformers_log_probs(path: str, temperatures: tuple[float, ...]) -> tuple[SequenceBatch, np.ndarray]:
    """Every text at every temperature, one after another; 0 at the first token of each."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32),
        AutoTokenizer.from_pretrained(path),
    )
    sequences: list[Any] = [tokenizer(text, return_tensors="pt").input_ids[0] for text in TEXTS]
    expected, cases = [], [(ids, temperature) for ids in sequences for temperature in temperatures]
    with torch.no_grad():
        for ids, temperature in cases:
            scores = (model(ids[None]).logits[0, :-1] / temperature).log_softmax(-1)
            expected += [torch.zeros(1), scores.gather(1, ids[1:, None])[:, 0]]
    batch = SequenceBatch.from_sequences(
        [ids.numpy() for ids, _ in cases],
        [np.arange(len(ids)) > 0 for ids, _ in cases],
        [f"s{i}" for i in range(len(cases))],
        temperature=np.array([temperature for _, temperature in cases]),
    )
    return batch, torch.cat(expected).numpy()


def test_log_probs_of_the_real_model_are_those_of_transformers(folder: Path) -> None:
    path = str(folder / "model")
    batch, expected = transformers_log_probs(path, (1.0, 0.7))
    for found in run_ranks(2, megatron_log_probs, path, batch, timeout=600):
        assert np.abs(found - expected).max() <= 1e-4


def test_what_follows_a_turn_is_as_the_real_template_has_it(folder: Path) -> None:
    tokenizer = PromptTokenizer(folder / "model")
    frame, (end,) = TurnFrame(tokenizer, "user"), tokenizer.eos_token_ids
    follows = "<|im_end|>\n<|im_start|>user\n36<|im_end|>\n<|im_start|>assistant\n"
    assert frame.tokens("36", [5]) == tokenizer.encode_text(follows) == [end, *frame.tokens("36", [end])]


def test_a_countdown_step_with_a_calculator_on_a_real_model(folder: Path) -> None:
    make_inputs(folder / "inputs", task="countdown", style="english", no_model=None)
    config = ROOT / "configs" / "countdown_calculator.yaml"
    run = train(folder / "calculator", folder, "steps=1", "eval.prompts=1", config=config, timeout=1000)
    assert run.code == 0, run.output
    (metrics,) = run.steps
    assert metrics["gap/max_abs"] <= 1e-4
    assert metrics["rollout/turns_max"] > 1
    assert metrics["rollout/environment_errors"] == 0


def test_two_countdown_steps_on_a_real_model(folder: Path) -> None:
    make_inputs(folder / "inputs", task="countdown", style="english", no_model=None)
    config = ROOT / "configs" / "smollm2_countdown.yaml"
    run = train(folder / "run", folder, config=config, timeout=1000)
    assert run.code == 0, run.output
    assert [row["step"] for row in run.steps] == [1, 2]
    # The engine is transformers: its log-probs and Megatron's agree on the real weights.
    assert max(row["gap/max_abs"] for row in run.steps) <= 1e-4
    assert all(row["rollout/response_length_mean"] > 5 for row in run.steps)
    # The answers differ in length, which the overlong punishment rewards differently: the updates are real ones.
    assert all(row["optimizer/grad_norm"] > 0 for row in run.steps)
