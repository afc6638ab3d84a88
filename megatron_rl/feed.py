"""How trainer ranks get their batches; what is computed from them is in `policy`.

Rank 0 waits for a step to be ready, each data-parallel leader pulls its own share over HTTP and passes it to its
model-parallel peers. Supervised batches for the warm-up are read from their file by every rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np

from megatron_rl.algorithms.normalisation import token_weights
from megatron_rl.cluster.rank_zero import RankZero, unless_ending
from megatron_rl.config import Config, read_hf_config
from megatron_rl.data import PromptCursor, PromptDataset, PromptTokenizer
from megatron_rl.policy.batch import SequenceBatch
from megatron_rl.policy.distributed import data_parallel_rank, is_data_parallel_leader
from megatron_rl.policy.exchange import broadcast_to_replica
from megatron_rl.policy.microbatch import Plan
from megatron_rl.policy.step_batch import LocalUpdate, Update, plan_lengths, plan_step
from megatron_rl.rollout.pull import ControllerClient, ControllerError, EngineNews, StepStatus
from megatron_rl.rollout.routed import RouteFormat
from megatron_rl.rollout.wire import Gaps, RolloutShard, RolloutTable
from megatron_rl.routes import RouteStore, StoredRoutes

T = TypeVar("T")
REPAIR_PAUSE_S = 10.0
"""Pause before engines are looked at again that may need weights: what did not help will not help at once."""


class RolloutFeed:
    """The trainer's side of the controller.

    `say` shows a line to the user, on rank 0; `interrupted` and `stop_arrives` are those of `Publisher`.
    """

    def __init__(
        self,
        cfg: Config,
        client: ControllerClient,
        zero: RankZero,
        say: Callable[[str], None],
        interrupted: Callable[[], bool],
        stop_arrives: Callable[[], bool],
    ) -> None:
        self._cfg, self._client, self._zero = cfg, client, zero
        self._interrupted, self._stop_arrives = interrupted, stop_arrives
        self._next_repair, self._say, self._news = 0.0, say, EngineNews()
        self._dp_rank, self._leader = data_parallel_rank(), is_data_parallel_leader()
        routes = RouteFormat.of(cfg, read_hf_config(cfg.model.path)) if cfg.engine.routed_experts else None
        self._routes = None if routes is None else routes.store()

    def start(self, step: int) -> None:
        """The engines hold the weights of `step`: its rollouts may be generated."""
        self._on_zero(f"start of step {step}", lambda: self._client.set_weights_version(step))

    def announce(self, version: int, serving: Sequence[str], checksum: str | None, repaired: bool) -> None:
        """Tell the controller who holds which weights, see `Replicas.publish`."""

        def tell() -> None:
            self._client.set_weights_version(version, serving, checksum, start=False, repaired=repaired)

        self._unless_ending(f"who holds weights {version}", tell)

    def wait(self, step: int) -> list[str] | None:
        """Until the controller has a whole batch for `step`: an empty list.

        Returns early, or although the batch is there, with the engines that need weights, at most every
        `REPAIR_PAUSE_S`, and with None when the run is to end.
        """
        timeout = self._cfg.rollout.step_timeout_s

        def repairable(status: StepStatus) -> bool:
            self.look(status.engines)
            return bool(status.needs_weights) and time.monotonic() >= self._next_repair

        def poll() -> list[str] | None:
            status = self._client.wait_ready(step, timeout, self._interrupted, repairable)
            if status.status == "ready" and not repairable(status):
                return []
            self._next_repair = time.monotonic() + REPAIR_PAUSE_S
            return None if self._interrupted() else status.needs_weights

        return self._unless_ending(f"rollouts of step {step}", poll, timeout)

    def look(self, engines: Mapping[str, str]) -> None:
        """Tell the user which went out or came back. `engines`: by URL, why one does not serve."""
        for line in self._news.lines(engines):
            self._say(line)

    def wait_for_engines(self, version: int) -> None:
        """Until the engines may be given weights `version`; when the run is to end, they get them as they are.

        The weights are trained already, so this step is completed, whatever comes.
        """
        timeout = self._cfg.rollout.step_timeout_s

        def poll() -> None:
            self._client.wait_update(version, timeout, self._interrupted)

        self._unless_ending(f"engines free for weights {version}", poll, timeout)

    def evaluate(self, label: str, step: int, prompts: int, samples_per_prompt: int) -> dict[str, float] | None:
        """Metrics of an evaluation; None when it was cut off since the run is to end."""
        timeout = self._cfg.rollout.step_timeout_s

        def ask() -> dict[str, float] | None:
            return self._client.evaluate(
                label=label,
                step=step,
                prompts=prompts,
                samples_per_prompt=samples_per_prompt,
                timeout_s=timeout,
                interrupted=self._interrupted,
                look=self.look,
            )

        return self._unless_ending(f"evaluation of step {step}", ask, timeout)

    def pull(self, step: int) -> tuple[RolloutTable, list[LocalUpdate]]:
        """The step's table, and this rank's share of each update."""
        table = RolloutTable.from_bytes(self._share(lambda: self._client.table(step)))
        updates = plan_step(vars(table), self._cfg, step)
        return table, [self._pull_update(step, update) for update in updates]

    def done(self, step: int, gaps: Gaps | None) -> None:
        """The step was trained: its prompts count as trained, its samples are dumped, with their gaps."""
        self._on_zero(f"end of step {step}", lambda: self._client.done(step, gaps))

    def get_state(self) -> bytes:
        """What a checkpoint remembers of the controller."""
        return self._on_zero("controller state", self._client.get_state)

    def put_state(self, blob: bytes) -> None:
        """Restore a controller that has just started."""
        self._on_zero("controller state", lambda: self._client.put_state(blob))

    def _pull_update(self, step: int, update: Update) -> LocalUpdate:
        rows = update.samples[update.local(self._dp_rank)].tolist()
        shard = self._share(lambda: self._client.samples(step, rows))
        return LocalUpdate(update, self._dp_rank, _sequence_batch(shard, self._routes))

    def _share(self, fetch: Callable[[], bytes]) -> bytes:
        """What the leader fetches, on all ranks of its model replica."""
        return broadcast_to_replica(fetch() if self._leader else None)

    def _unless_ending(self, what: str, call: Callable[[], T], timeout_s: float = 0.0) -> T | None:
        """What rank 0 gets in `timeout_s`; None when the controller fails it since the run is to end."""
        return self._on_zero(what, lambda: unless_ending(call, ControllerError, self._stop_arrives), timeout_s)

    def _on_zero(self, what: str, call: Callable[[], T], timeout_s: float = 0.0) -> T:
        """What rank 0 gets; the others wait longer, so that they are told what it waited for."""
        return self._zero.run(what, call, timeout_s + self._cfg.cluster.controller_timeout_s + 30)


def _sequence_batch(blob: bytes, routes: RouteStore | None) -> SequenceBatch:
    """Of a shard; its routes of experts are read when they are used, by each rank those of its layers and tokens."""
    shard = RolloutShard.from_bytes(blob)
    return SequenceBatch(
        tokens=shard.tokens,
        offsets=shard.offsets,
        mask=shard.mask,
        temperature=shard.temperature,
        sample_ids=tuple(shard.sample_ids),
        behaviour_log_probs=shard.behaviour_log_probs,
        routes=None if routes is None else StoredRoutes(routes, shard.routes),
    )


def sft_batches(cfg: Config) -> Iterator[tuple[SequenceBatch, Plan]]:
    """Supervised batches of `sft.batch_size` sequences: this rank's share and the plan of all ranks.

    Every rank draws the same records and keeps its own; the loss weight of a target token is 1 / all target tokens.
    """
    assert cfg.sft.data is not None
    dataset = PromptDataset.load(cfg.sft.data, require=("target",))
    tokenizer = PromptTokenizer(cfg.model.path, cfg.data.system_prompt, chat_template=cfg.data.chat_template)
    cursor = PromptCursor(len(dataset), cfg.seed, fingerprint=dataset.fingerprint)
    for _ in range(cfg.sft.max_steps):
        first = cursor.drawn
        pairs = [tokenizer.encode_sft(dataset[i]) for i in cursor.next(cfg.sft.batch_size)]
        plan = plan_lengths([len(p) + len(t) for p, t in pairs], cfg)
        weights = token_weights("token_mean", [len(target) for _, target in pairs])
        mine = plan.sequences(data_parallel_rank())
        batch = SequenceBatch.from_sequences(
            [pairs[i][0] + pairs[i][1] for i in mine],
            [[0] * len(pairs[i][0]) + [1] * len(pairs[i][1]) for i in mine],
            [f"sft-{first + i}" for i in mine],
        )
        per_token = np.repeat(weights[list(mine)].astype(np.float32), batch.lengths)
        yield batch.with_arrays(weights=np.where(batch.mask, per_token, np.float32(0))), plan
