"""Held-out evaluation: samples of fixed prompts at the engines' present weights, judged, summed up, dumped.

Statistics are in `algorithms.evaluation`; when to evaluate is the trainer's business.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from megatron_rl.algorithms.evaluation import pass_at_k, share_interval
from megatron_rl.config import Config
from megatron_rl.data import PromptDataset

from .client import together
from .dump import evaluation_file, write_dump
from .generate import Examiner
from .progress import Status
from .protocol import SamplingSettings
from .sample import Group

log = logging.getLogger(__name__)
SEQUENCES_PER_REQUEST = 16


class EvalRequest(BaseModel):
    """What POST /v1/eval asks for."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    step: int = Field(ge=0)
    prompts: int = Field(ge=1)
    samples_per_prompt: int = Field(1, ge=1)
    label: str = Field("eval", pattern=r"^[A-Za-z0-9_]*$")


@dataclass
class EvalJob:
    """One evaluation and how far it is."""

    id: str
    request: EvalRequest
    status: Status = "waiting"
    message: str = ""
    metrics: dict[str, float] = field(default_factory=dict)


class Evaluator:
    """Runs one evaluation after the other; they share the engines with training samples."""

    def __init__(self, cfg: Config, dataset: PromptDataset | None, examiner: Examiner) -> None:
        self._cfg, self._dataset, self._examiner = cfg, dataset, examiner
        self._queue: asyncio.Queue[EvalJob] = asyncio.Queue()
        self.jobs: dict[str, EvalJob] = {}

    def submit(self, request: EvalRequest) -> EvalJob:
        """Queue an evaluation. Raises ValueError when there are no held-out prompts."""
        if self._dataset is None:
            raise ValueError("no held-out prompts: set data.eval_prompts to a .jsonl file")
        job = EvalJob(f"eval-{len(self.jobs)}", request)
        self.jobs[job.id] = job
        self._queue.put_nowait(job)
        return job

    async def run(self) -> None:
        """Work through the queue; a failure ends its job only."""
        while True:
            job = await self._queue.get()
            job.status = "generating"
            try:
                async with asyncio.timeout(self._cfg.rollout.step_timeout_s):
                    job.metrics = await self._evaluate(job.request)
                job.status = "ready"
                log.info("%s at step %d: %s", job.id, job.request.step, job.metrics)
                continue
            except TimeoutError:
                reason = f"not finished within {self._cfg.rollout.step_timeout_s:g} s (rollout.step_timeout_s)"
            except Exception as error:
                log.exception("%s failed", job.id)
                reason = str(error)
            job.status, job.message = "failed", reason

    async def _evaluate(self, request: EvalRequest) -> dict[str, float]:
        assert self._dataset is not None
        count = min(request.prompts, len(self._dataset))
        groups = await asyncio.gather(*(self._start(i, request) for i in range(count)))
        per_request = max(1, SEQUENCES_PER_REQUEST // request.samples_per_prompt)
        starts = range(0, count, per_request)
        await together([self._answer(groups[start : start + per_request]) for start in starts])
        if self._cfg.logging.dump_rollouts:
            path = evaluation_file(self._cfg.run_dir, request.step, request.label)
            records = [self._dataset[g.id] for g in groups]
            await asyncio.to_thread(write_dump, path, request.step, groups, records, self._examiner.tokenizer, ())
        return summarise(groups, self._cfg.eval.ks, self._cfg.seed)

    async def _start(self, index: int, request: EvalRequest) -> Group:
        """Ids and seeds depend on the prompt's position only: every evaluation asks the same questions the same way."""
        assert self._dataset is not None
        record, temperature = self._dataset[index], self._cfg.eval.temperature
        size = request.samples_per_prompt
        return await self._examiner.start(index, record, size, version=request.step, temperature=temperature, kind="e")

    async def _answer(self, groups: list[Group]) -> None:
        assert self._dataset is not None
        settings = SamplingSettings(
            temperature=self._cfg.eval.temperature,
            max_new_tokens=self._cfg.rollout.max_response_tokens,
            stop_token_ids=self._examiner.stop_token_ids,
        )
        await self._examiner.answer(groups, [self._dataset[group.id] for group in groups], settings)


def summarise(groups: list[Group], ks: list[int], seed: int) -> dict[str, float]:
    """Metrics of an evaluation, named as after `eval/`.

    A sample is right when its raw correctness is above 0.5; one that could not be judged is wrong. pass_at_1_low/high:
    95 % interval over prompts (`share_interval`). format_valid: share of samples with the full score of the verifier
    named `format` or `*_format`; absent without one.
    """
    samples = [s for g in groups for s in g.samples]
    right = [sum(s.correctness > 0.5 for s in g.samples) for g in groups]
    sizes = [len(g.samples) for g in groups]
    metrics: dict[str, float] = {}
    for k in sorted({1, *ks}):
        if k <= min(sizes):
            estimates = [pass_at_k(n, c, k) for n, c in zip(sizes, right, strict=True)]
            low, high = share_interval(estimates, seed=seed)
            metrics |= {f"pass_at_{k}": float(np.mean(estimates)), f"pass_at_{k}_low": low, f"pass_at_{k}_high": high}
    rewards = [s.reward for s in samples if s.valid]
    formats = [v for s in samples for n, v in s.components.items() if n == "format" or n.endswith("_format")]
    if formats:
        metrics["format_valid"] = float(np.mean([v > 1 - 1e-6 for v in formats]))
    if rewards:
        metrics["reward_mean"] = float(np.mean(rewards))
    return metrics | {
        "response_length_mean": float(np.mean([s.response_length for s in samples])),
        "truncated_fraction": float(np.mean([s.truncated for s in samples])),
        "prompts": float(len(groups)),
        "samples": float(len(samples)),
    }
