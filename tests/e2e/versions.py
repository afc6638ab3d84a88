"""Which weights sampled a token: log-probs of what a run has sampled, computed anew for each version. No tests."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from transformers import AutoModelForCausalLM

from megatron_rl.audit import saved_books
from megatron_rl.policy import checkpoint
from megatron_rl.rollout.sample import Group, Sample
from megatron_rl.rollout.wire import decode, unpack_groups
from megatron_rl.weights.convert.actions import megatron_to_hf
from megatron_rl.weights.convert.opened import open_checkpoint
from tests.convert_models import convert

COLUMNS = ["sample_id", "trained", "weight_version_first", "weight_version_last", "response_tokens"]


class Versions:
    """The weights of every version of a run without a warm-up that has kept its checkpoints, one for each step.

    Args:
        run: its directory.
        model: the Hugging Face directory that it began with: version 0.
        folder: for converted weights.
    """

    def __init__(self, run: Path, model: Path, folder: Path) -> None:
        self._run, self._model_path, self._folder = run, model, folder
        self.model: Callable[[int], Any] = cache(self._load)

    def _load(self, version: int) -> Any:
        out = self._folder / f"v{version}" if version else self._model_path
        if version:
            source = open_checkpoint(checkpoint.at(self._run, version), self._model_path)
            convert(megatron_to_hf(source, out, None))
        return AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()

    @torch.inference_mode()
    def log_probs(self, sample: Sample, version: int) -> np.ndarray:
        """float32 [response]: of every token of the response under these weights."""
        tokens = torch.from_numpy(np.concatenate([sample.prompt_tokens, sample.response_tokens]))
        logits = self.model(version)(tokens[None]).logits[0].float() / sample.temperature
        found = torch.log_softmax(logits, -1)[:-1].gather(1, tokens[1:, None])[:, 0]
        return found[sample.prompt_length - 1 :].numpy()

    def error(self, sample: Sample, older: int = 0) -> float:
        """Largest difference between a token's log-prob and that of the weights `older` versions before its own."""
        return max(
            float(np.abs(self.log_probs(sample, span.version - older) - sample.log_probs)[span.start : span.end].max())
            for span in sample.spans
        )


def kept_samples(run: Path, finished_only: bool = False) -> dict[str, Sample]:
    """What lay in the checkpoints, unfinished responses among it, by its name: as it was in the latest that has it."""
    kept: dict[str, Sample] = {}
    for folder in sorted((run / "checkpoints").glob("step-*")):
        arrays, metadata = decode(checkpoint.read_extra(folder)["controller"])
        groups: list[Group] = unpack_groups(arrays, metadata["groups"])
        finished = set(saved_books(folder)["finished"])
        wanted = (group for group in groups if group.id in finished or not finished_only)
        kept |= {sample.id: sample for group in wanted for sample in group.samples}
    return kept


def trained_samples(run: Path) -> list[Sample]:
    """What was trained on and had lain finished in some checkpoint before, which holds its tokens."""
    kept = kept_samples(run, finished_only=True)
    rows = [
        row
        for file in sorted((run / "rollouts").glob("step-*.parquet"))
        for row in pq.read_table(file, columns=COLUMNS).to_pylist()
        if row["trained"]
    ]
    names = [row["sample_id"] for row in rows]
    assert len(set(names)) == len(names), "a sample was trained on twice"
    # One that was dropped for its age and generated anew has the same name.
    return [kept[row["sample_id"]] for row in rows if row["sample_id"] in kept and _is(kept[row["sample_id"]], row)]


def _is(sample: Sample, row: dict[str, Any]) -> bool:
    return (sample.version_first, sample.version_last, sample.response_length) == (
        row["weight_version_first"],
        row["weight_version_last"],
        row["response_tokens"],
    )
