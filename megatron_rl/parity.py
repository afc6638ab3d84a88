"""Do engine and trainer agree on log-probs? Asks both, tries what could be wrong, and writes down what it found.

    one engine  --/generate--> sampled tokens and their log-probs; the same tokens, scored at temperature 1
    trainer     --forward----> log-probs of these tokens, at other temperatures and with rounded weights as well

`check_parity` starts it and reads the result; `python -m megatron_rl.parity CONFIG PROMPTS FILE` is one trainer rank.
What the findings mean is `parity_report`. Nothing is trained.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from megatron_rl.config import Config, load_config
from megatron_rl.data import DataError, PromptDataset, PromptTokenizer
from megatron_rl.parity_report import Evidence, Gap
from megatron_rl.rollout.answers import parse_generations
from megatron_rl.rollout.control import EngineControl
from megatron_rl.rollout.fitness import ExpectedModel, Unfit, require_model
from megatron_rl.rollout.protocol import EngineError, Prompt, SamplingSettings, generate_request

if TYPE_CHECKING:
    from collections.abc import Iterator

    from megatron_rl.cluster.rank_zero import RankZero
    from megatron_rl.policy.policy import Policy

log = logging.getLogger(__name__)
RESPONSE_TOKENS = 128
"""Longest response that is compared."""
TEMPERATURES = (0.25, 4.0)
"""Times the configured one: where the engine's is looked for."""


def check_parity(cfg: Config, prompts: int, reload_engine: bool = False) -> Evidence:
    """Start one engine as configured (or ask the first of engine.urls) and all trainer ranks on this machine.

    Everything is written below RUN/preflight. A server of engine.urls may be in use: only with `reload_engine` is
    it paused, emptied and given the weights of model.path as version 0.

    Raises:
        RunDirError, RunFailed: see `cluster.local.run_ranks`.
    """
    from megatron_rl.cluster.local import run_ranks

    folder = Path(cfg.run_dir) / "preflight"
    engine = cfg.engine.model_copy(update={"replicas": 1, "urls": cfg.engine.urls[:1]})
    found = folder.absolute() / "parity.json"
    found.unlink(missing_ok=True)
    alone = cfg.model_copy(update={"run_dir": str(folder), "engine": engine})
    words = [str(prompts), str(found), *(["--reload-engine"] if may_reload(cfg, reload_engine) else [])]
    run_ranks(alone, "megatron_rl.parity", *words)
    return Evidence.read(found)


def may_reload(cfg: Config, asked: bool) -> bool:
    """Whether the engine may be paused and read its weights again: its own one, or a server if the user says so."""
    if cfg.cluster.placement == "colocated":  # there the engine's memory is the trainer's by then
        return False
    return asked or not cfg.engine.urls


# ---------------------------------------------------------------------------------------------------------- the engine


@dataclass(frozen=True)
class Sampled:
    """What the engine has said of `prompts` sequences; log-probs are float32, of response tokens, end to end."""

    prompts: list[list[int]]
    responses: list[list[int]]
    log_probs: np.ndarray
    scored: np.ndarray
    dtype: str | None
    fp32_head: bool | None
    other_tokens: str | None


class Engine:
    """The one engine, as rank 0 asks it."""

    def __init__(self, cfg: Config, control: EngineControl, vocab_size: int, hidden_size: int) -> None:
        self._cfg, self._control, self._url = cfg, control, control.urls[0]
        self._expected = ExpectedModel(vocab_size, hidden_size)
        data = cfg.data
        self._tokenizer = PromptTokenizer(cfg.model.path, data.system_prompt, chat_template=data.chat_template)

    def sample(self, count: int) -> Sampled:
        """Responses to the first prompts of the run, and what the engine says of itself."""
        self._control.wait_ready()
        try:
            require_model(self._control.model_info()[self._url], self._expected)
        except Unfit as error:
            raise EngineError(f"engine {self._url} {error}") from None
        rollout, prompts = self._cfg.rollout, self._prompts(count)
        longest = min(rollout.max_response_tokens, RESPONSE_TOKENS)
        settings = SamplingSettings(rollout.temperature, longest, tuple(self._tokenizer.eos_token_ids))
        asked = [Prompt(f"p{i:06d}.", np.array(p), i, longest, settings) for i, p in enumerate(prompts)]
        answers = self._generate(generate_request(asked))
        found = parse_generations(orjson.dumps(answers), asked, url=self._url, vocab_size=self._expected.vocab_size)
        responses = [g.tokens.tolist() for g in found]
        told = [answer["meta_info"].get("prompt_tokens") for answer in answers]
        scored, other_tokens = self.score(prompts, responses)
        for prompt, tokens in zip(prompts, told, strict=True):
            if tokens not in (None, len(prompt)):
                other_tokens = f"a prompt of {len(prompt)} tokens arrived as one of {tokens}"
        info = self._control.calls.get("/server_info", [self._url], self._control.timeout_s).result()
        server = info.require_all("server_info")[self._url]
        head = server.get("enable_fp32_lm_head")
        log_probs = np.concatenate([g.log_probs for g in found])
        return Sampled(prompts, responses, log_probs, scored, _dtype(server), head, other_tokens)

    def score(self, prompts: Sequence[list[int]], responses: Sequence[list[int]]) -> tuple[np.ndarray, str | None]:
        """The engine's log-probs at temperature 1 of these responses, and how it saw other tokens than these."""
        sequences = [p + r for p, r in zip(prompts, responses, strict=True)]
        body = {
            "input_ids": sequences,
            "sampling_params": [{"temperature": 1.0, "max_new_tokens": 1}] * len(sequences),
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        scores: list[np.ndarray] = []
        other: str | None = None
        answers = self._generate(orjson.dumps(body))
        for answer, sequence, response in zip(answers, sequences, responses, strict=True):
            entries = answer["meta_info"]["input_token_logprobs"]
            last = self._expected.vocab_size - 1  # SGLang 0.5.23 shows the last entry of the vocabulary as token 0
            seen, sent = ([0 if t == last else t for t in ids] for ids in ([e[1] for e in entries], sequence))
            if seen != sent:
                pairs = enumerate(zip(seen, sent, strict=False))
                place = next((i for i, (a, b) in pairs if a != b), min(len(seen), len(sent)))
                other = f"of {len(sent)} tokens it saw {len(seen)}, from place {place} on other ones"
            tail = entries[-len(response) :]
            scores.append(np.array([np.nan if entry[0] is None else entry[0] for entry in tail], np.float32))
        return np.concatenate(scores), other

    def read_weights_again(self) -> list[str] | None:
        """Have the engine load model.path; names of the parameters that changed. None when it cannot say."""
        try:
            before = self._control.checksums()[self._url]
            self._control.update_from_disk(Path(self._cfg.model.path).absolute(), 0)
            after = self._control.checksums()[self._url]
        except EngineError as error:
            log.warning("the engine could not read the weights again: %s", error)
            return None
        pairs = zip(before, after, strict=True)
        return sorted({name for old, new in pairs for name in old if old[name] != new.get(name)})

    def _generate(self, body: bytes) -> list[dict[str, Any]]:
        timeout = self._cfg.rollout.request_timeout_s
        replies = self._control.calls.post("/generate", {self._url: body}, timeout).result()
        answers: list[dict[str, Any]] = replies.require_all("generate")[self._url]
        return answers

    def _prompts(self, count: int) -> list[list[int]]:
        data, longest = self._cfg.data, self._cfg.rollout.max_prompt_tokens
        records = iter(PromptDataset.load(data.prompts))
        prompts: list[list[int]] = []
        while len(prompts) < count and (record := next(records, None)) is not None:
            tokens = self._tokenizer.encode(record)
            if len(tokens) <= longest:
                prompts.append(tokens)
        if not prompts:
            raise DataError(f"{data.prompts}: no prompt has at most rollout.max_prompt_tokens={longest} tokens")
        return prompts


def _dtype(server: dict[str, Any]) -> str | None:
    """The engine's number format, if it says one; `auto` is that of the weights."""
    found = str(server.get("dtype"))
    return {"float": "float32", "half": "float16"}.get(found, found) if found not in ("None", "auto") else None


# --------------------------------------------------------------------------------------------------------- the trainer


class Trainer:
    """The policy, asked for log-probs of what the engine sampled; every method is collective over all ranks."""

    def __init__(self, cfg: Config, policy: Policy, sampled: Sampled) -> None:
        from megatron_rl.policy.batch import SequenceBatch
        from megatron_rl.policy.step_batch import plan_lengths

        self._policy = policy
        pairs = list(zip(sampled.prompts, sampled.responses, strict=True))
        batch = SequenceBatch.from_sequences(
            [p + r for p, r in pairs],
            [[0] * len(p) + [1] * len(r) for p, r in pairs],
            [f"p{i}" for i in range(len(pairs))],
        )
        self._plan = plan_lengths(batch.lengths, cfg)
        self._mine = self._plan.sequences(policy.data_parallel_rank)
        self._batch = batch.select(self._mine) if self._mine else batch.select([])

    def log_probs(self, temperature: float, entropy: bool = False) -> np.ndarray:
        """float64 [T] of all response tokens, or [2, T] with the entropy at each; equal on all ranks."""
        from dataclasses import replace

        from megatron_rl.policy.exchange import merge_of_all_ranks

        batch = self._batch
        batch = replace(batch, temperature=np.full(len(batch), temperature, np.float32))
        found = self._policy.log_probs(batch, self._plan, entropy)
        rows = [found.log_probs] if found.entropy is None else [found.log_probs, found.entropy]
        share = {}
        for index, start, end in zip(self._mine, batch.offsets[:-1], batch.offsets[1:], strict=True):
            live = batch.mask[start:end]
            share[index] = np.stack([row[start:end][live] for row in rows])
        merged = merge_of_all_ranks(share)
        whole = np.concatenate([merged[index] for index in sorted(merged)], axis=1).astype(np.float64)
        return whole if entropy else whole[0]

    @contextmanager
    def rounded(self) -> Iterator[None]:
        """With weights rounded to bfloat16 while the block runs."""
        import torch

        parameters = [p for chunk in self._policy.chunks for p in chunk.parameters()]
        kept = [p.detach().clone() for p in parameters]
        try:
            with torch.no_grad():
                for p in parameters:
                    p.copy_(p.to(torch.bfloat16))
            yield
        finally:
            with torch.no_grad():
                for p, old in zip(parameters, kept, strict=True):
                    p.copy_(old)


def examine(
    cfg: Config,
    trainer: Trainer,
    engine: Engine,
    sampled: Sampled,
    zero: RankZero,
    reload_engine: bool,
    say: Callable[[str], None] = lambda line: None,
) -> Evidence:
    """Compare, and try what could be wrong as long as nothing explains the gap, which it will `say`. Collective."""
    t, dtype = cfg.rollout.temperature, cfg.model.dtype
    with_entropy = cfg.loss.logprob_backend != "te"
    rows = np.atleast_2d(trainer.log_probs(t, with_entropy))
    gap = Gap.of(rows[0], sampled.log_probs)
    evidence: dict[str, Any] = {
        "prompts": len(sampled.prompts),
        "temperature": t,
        "trainer_dtype": dtype,
        "engine_dtype": sampled.dtype,
        "gap": gap,
        "likelier": _likelier(rows[0], rows[1]) if with_entropy else None,
        "other_tokens": sampled.other_tokens,
        "fp32_head": sampled.fp32_head,
    }
    if gap.within(dtype) or sampled.other_tokens:
        return Evidence(**evidence)
    say("they differ: trying what could be wrong")
    plain = trainer.log_probs(1.0)
    evidence["scored"] = scored = Gap.of(plain, sampled.scored)
    if scored.within(dtype):
        best, fitted = _fit(trainer, sampled.log_probs, t)
        evidence |= {"fitted_temperature": best, "fitted": fitted}
        evidence["above"] = float(np.mean(sampled.log_probs >= rows[0] - 1e-5))
        return Evidence(**evidence)
    scores = sampled.scored
    if reload_engine:

        def read_again() -> tuple[list[str] | None, np.ndarray]:
            changed = engine.read_weights_again()
            return changed, engine.score(sampled.prompts, sampled.responses)[0]

        changed, scores = zero.run("the engine reads its weights", read_again, 4 * cfg.engine.update_timeout_s)
        evidence |= {"changed": changed, "reloaded": Gap.of(plain, scores)}
    if dtype == "float32":
        with trainer.rounded():
            evidence["rounded"] = Gap.of(trainer.log_probs(1.0), scores)
    return Evidence(**evidence)


def _likelier(log_probs: np.ndarray, entropy: np.ndarray) -> float:
    """E[log p] = -H where tokens are drawn from p, token by token, whenever a response ends: their sum is a martingale.

    In standard deviations; large when tokens come from the likelier part of p alone.
    """
    excess = log_probs + entropy
    spread = float(np.sqrt(np.square(excess).sum()))
    return float(excess.sum()) / spread if spread else 0.0


def _fit(trainer: Trainer, engine: np.ndarray, temperature: float) -> tuple[float, Gap]:
    """The temperature in TEMPERATURES x `temperature` at which the trainer is nearest to the engine, by sections."""
    low, high = (np.log(temperature * factor) for factor in TEMPERATURES)
    tried: dict[float, Gap] = {}

    def distance(x: float) -> float:
        value = float(np.exp(x))
        tried[value] = Gap.of(trainer.log_probs(value), engine)
        return tried[value].mean_abs

    distance(0.0)  # 1, which needs no search
    ratio = (np.sqrt(5) - 1) / 2
    a, b = high - ratio * (high - low), low + ratio * (high - low)
    at_a, at_b = distance(a), distance(b)
    while high - low > 1e-5:
        if at_a < at_b:
            high, b, at_b = b, a, at_a
            a = high - ratio * (high - low)
            at_a = distance(a)
        else:
            low, a, at_a = a, b, at_b
            b = low + ratio * (high - low)
            at_b = distance(b)
    best = min(tried, key=lambda value: tried[value].mean_abs)
    return best, tried[best]


# ------------------------------------------------------------------------------------------------------------ one rank


def main(argv: list[str] | None = None) -> None:
    """`python -m megatron_rl.parity CONFIG PROMPTS FILE`, one process per rank."""
    from megatron_rl.bring_up import in_words

    parser = argparse.ArgumentParser(description="One trainer rank of `megatron-rl preflight --parity`.")
    parser.add_argument("config", type=Path)
    parser.add_argument("prompts", type=int)
    parser.add_argument("file", type=Path)
    parser.add_argument("--reload-engine", action="store_true")
    words = parser.parse_args(argv)
    try:
        _one_rank(load_config(words.config), words.prompts, words.file, words.reload_engine)
    except Exception as error:
        message = in_words(error)
        if message is None:
            raise
        log.error("%s", message)
        sys.exit(1)


def _one_rank(cfg: Config, prompts: int, file: Path, reload_engine: bool) -> None:
    import torch.distributed as dist

    from megatron_rl.bring_up import connect_engines
    from megatron_rl.cluster.bootstrap import find_place
    from megatron_rl.cluster.rank_zero import RankZero
    from megatron_rl.cluster.run_dir import RunDir
    from megatron_rl.colocation import EngineMemory
    from megatron_rl.config import read_hf_config
    from megatron_rl.monitor.logs import setup_logging
    from megatron_rl.monitor.progress import Progress
    from megatron_rl.policy import distributed
    from megatron_rl.policy.policy import Policy

    run = RunDir(cfg.run_dir)
    distributed.initialize(
        find_place(os.environ, run.endpoints),
        cfg.parallel,
        cfg.seed,
        cfg.cluster.collective_timeout_s,
        cfg.cluster.device,
    )
    setup_logging("trainer", dist.get_rank(), cfg.logging.level)
    progress = Progress("parity", mode=cfg.logging.console if dist.get_rank() == 0 else "quiet")
    try:
        zero = RankZero(dist.distributed_c10d._get_default_store(), dist.get_rank())
        where = cfg.engine.urls or run.log("engine", 0)
        progress.stage(f"waiting up to {cfg.engine.ready_timeout_s:g} s for the engine ({where})")
        control, hf = connect_engines(cfg, zero), read_hf_config(cfg.model.path)
        engine = Engine(cfg, control, hf.vocab_size, hf.hidden_size)
        patience = cfg.engine.ready_timeout_s + 2 * cfg.rollout.request_timeout_s + cfg.engine.update_timeout_s
        progress.stage(f"the engine samples answers to {prompts} prompts")
        sampled = zero.run("what the engine samples", lambda: engine.sample(prompts), patience)
        if cfg.cluster.placement == "colocated":
            zero.run("the engine gives up its memory", EngineMemory(control, run).release_all, patience)
        progress.stage("the trainer loads the model and computes the same log-probs")
        trainer = Trainer(cfg, Policy.build(cfg), sampled)
        evidence = examine(cfg, trainer, engine, sampled, zero, reload_engine, progress.stage)
        if zero.is_zero:
            evidence.write(file)
        control.close()
    finally:
        progress.close()
        with suppress(RuntimeError):  # the peers may be gone
            distributed.shutdown()


if __name__ == "__main__":
    main()
