"""Which implementation runs where, and that Triton is not needed where it does not run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None  # importing it raises ImportError from here on
import torch
from megatron_rl.algorithms.spec import LossSpec
from megatron_rl.kernels import linear_logprob, policy_loss, vocab_parallel_logprob

target = torch.tensor([0, 3])
log_probs, _ = vocab_parallel_logprob(torch.zeros(2, 5), target)
again, _ = linear_logprob(torch.zeros(2, 4), torch.ones(5, 4), target)
assert torch.equal(log_probs, again)
policy_loss(log_probs, LossSpec(), weights=torch.ones(2), advantages=torch.ones(2))
print("done", "megatron_rl.kernels.triton" in sys.modules)
"""


def test_on_a_cpu_everything_works_without_triton() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TRITON], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.stdout.split() == ["done", "False"], done.stderr
