"""The controller process: prompts in, verified rollouts out, one step at a time, for a trainer that pulls them.

    trainer rank 0 --POST weights k--> [step loop] --groups--> [group task] x N --(client workers)--/generate--> engines
                                            |                    |    |                                            ^
                                            |                    |    '--turns--> environment processes            |
                                            |                    '--score--> reward workers                        |
    trainer leaders <--table, samples-- [server] <--batch k-- [step loop] <--done k-- trainer rank 0               |
    trainer rank 0  --POST eval------->  [eval loop] --/generate, turns, score--> as the group tasks               |
    trainer rank 0  --POST weights k--> [replica monitor] --/ready, /model_info, checksums-------------------------'

step loop    consumes prompts: those of suspended groups first, then given back ones, then in cursor order
             waits for the trainer's POST /v1/weights k (async: once); groups_per_step usable groups for batch k
                       (rollout.step_timeout_s); the trainer's POST /v1/step/k/done
             unblocked by those two requests, and by every group task that ends
             produces batch k; the dump of step k; free slots; whether the engines may be updated (GET /v1/update/k+1)
group task   consumes one prompt, or a suspended group
             waits for room at the gate; a replica that serves and engines' answers (rollout.request_timeout_s, each);
                       environments (rollout.environment_timeout_s a call); verifiers (reward.timeout_s)
             unblocked by the same; suspended or cancelled by the step loop, which tells the engine
             produces one judged group, a suspended one, or an error that fails the step
eval loop    consumes queued evaluations, one after the other
             waits for POST /v1/eval; all groups of the evaluation (rollout.step_timeout_s)
             unblocked by those
             produces metrics and a dump
monitor      consumes what is said of replicas: by the trainer, who updated them, and by requests that failed
             waits for the next look (POLL_S); answers of replicas (PROBE_TIMEOUT_S, CHECKSUM_TIMEOUT_S)
             unblocked by those, and by a request that failed
             produces which replicas serve, and which need weights
client       consume requests for tokens, and keep the connections (rollout.client_workers; none: in this process)
workers      wait for the next request; engines' answers, as long as the group task does
             unblocked by the controller, who cancels what it waits for no longer
             produce answers; one that died loses its requests, which are made again, and is started again
environment  consume calls of their episodes, one after the other (rollout.environment_workers)
processes    wait for the next call; what the environment does
             unblocked by calls, killed when one is late
             produce an answer to each call
server       consumes the trainer's requests, waits for nothing but the disk, answers at once

The controller never waits on the trainer with a deadline and never lets the trainer wait: it answers with a status, and
a failure of any loop becomes status `failed` with its message. Admission: see `pool.py`. Scheduling: `scheduler.py`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from aiohttp import web

from megatron_rl.config import Config, ConfigError, read_hf_config
from megatron_rl.data import DataError, PromptCursor, PromptDataset, PromptRecord, PromptTokenizer, fit_to_length
from megatron_rl.monitor.logs import setup_logging
from megatron_rl.rewards import RewardError, RewardPool
from megatron_rl.rewards.registry import required_keys

from .client import EngineClient
from .connect import connect_run
from .dump import remove_dumps_from, rollout_file, write_dump
from .endpoint import Endpoint, engine_pids, engine_urls, publish
from .evaluation import Evaluator
from .garbage import look_less_often
from .generate import Examiner, GroupMaker
from .ledger import Entry, Ledger
from .pace import Pace
from .pool import GroupPool
from .route_files import RouteFiles
from .routed import RouteFormat
from .sample import Sample
from .scheduler import Scheduler
from .server import build_app
from .turns import TurnTaker, open_turns, turn_metrics
from .wire import Gaps, RolloutTable, decode, encode, pack_groups, unpack_groups

log = logging.getLogger(__name__)
GRACE_S = 10.0
"""How long answers may take to be written after the end was asked for."""


class Prompts:
    """The run's prompts and tokenizer, checked for length.

    Raises:
        DataError: an unreadable file, a bad line, a prompt longer than rollout.max_prompt_tokens (see
            data.drop_long_prompts), or no prompt at all.
    """

    def __init__(self, cfg: Config) -> None:
        data, longest = cfg.data, cfg.rollout.max_prompt_tokens
        self.tokenizer = PromptTokenizer(cfg.model.path, data.system_prompt, chat_template=data.chat_template)
        keys = required_keys(component.name for component in cfg.reward.components)
        train = PromptDataset.load(data.prompts, require=keys, max_prompts=data.max_prompts)
        self.train, self.rejected = fit_to_length(train, self.tokenizer, longest, data.drop_long_prompts)
        self.held_out: PromptDataset | None = None
        if data.eval_prompts is not None:
            held_out = PromptDataset.load(data.eval_prompts, require=keys)
            self.held_out, _ = fit_to_length(held_out, self.tokenizer, longest, data.drop_long_prompts)


class Controller:
    """Holds the loops and answers the server; every method returns at once or awaits disk only."""

    def __init__(
        self,
        cfg: Config,
        prompts: Prompts,
        client: EngineClient,
        verifiers: RewardPool,
        turns: TurnTaker | None = None,
    ) -> None:
        self._cfg, self._prompts, self._client = cfg, prompts, client
        cursor = PromptCursor(len(prompts.train), cfg.seed, cfg.data.shuffle, prompts.train.fingerprint)
        pace = Pace(cfg)
        pool = GroupPool(cursor, pace.capacity, drops_uninformative=pace.refill)
        examiner = Examiner(prompts.tokenizer, client, verifiers, cfg.seed, turns)
        maker = GroupMaker(cfg, prompts.train, examiner, client)
        self.scheduler = Scheduler(cfg, pool, maker)
        routes = RouteFormat.of(cfg, read_hf_config(cfg.model.path)) if cfg.engine.routed_experts else None
        self._routes = None if routes is None else RouteFiles(cfg.run_dir, routes.store(), pool, maker)
        self.evaluator = Evaluator(cfg, prompts.held_out, examiner)
        self._ledger = Ledger(cfg.run_dir)
        self._tables: dict[int, RolloutTable] = {}
        self._engine_pids = self._pids_of_engines()

    async def run(self) -> None:
        """The step loop and the eval loop, until cancelled."""
        try:
            await asyncio.gather(self.scheduler.run(), self.evaluator.run())
        finally:
            self.scheduler.stop()

    def publish(
        self,
        version: int,
        serving: Collection[str] | None,
        checksum: str | None,
        start: bool,
        repaired: bool,
    ) -> None:
        """The engines at `serving` hold weights `version` (None: all that serve); see `Replicas.publish`.

        `start`: its step may be sampled now. Raises StepConflict for a version that does not fit the step.
        """
        if start:
            self.scheduler.publish(version)
        self._client.replicas.publish(version, serving, checksum, repaired)

    def step_status(self, step: int) -> dict[str, Any]:
        """Answer of GET /v1/step/{k}; steps that are not yet or no longer sampled have no progress."""
        progress = self.scheduler.progress
        if step < progress.step:
            return {"status": "stopped", "progress": {}, "message": f"step {step} was trained on already"}
        if step > progress.step and progress.status not in ("failed", "stopped"):
            return {"status": "waiting", "progress": {}, "message": f"the controller is at step {progress.step}"}
        return {
            "status": progress.status,
            "progress": self.scheduler.counts(),
            "message": progress.message,
            "needs_weights": self._client.replicas.needs_weights,
            "engines": self.engines,
        }

    @property
    def engines(self) -> Mapping[str, str]:
        """By URL, why an engine does not serve; empty for one that does."""
        return self._client.replicas.states

    def update_status(self, version: int) -> dict[str, Any]:
        """Answer of GET /v1/update/{version}. Raises StepConflict while the batch before it is not there.

        Where no engine serves any more but some would with new weights, there is nothing that the update would disturb.
        """
        status, message = self.scheduler.update_status(version)
        replicas = self._client.replicas
        if status == "waiting" and replicas.needs_weights and not replicas.serving:
            status = "ready"
        return {"status": status, "message": message}

    def table(self, step: int) -> RolloutTable:
        """One row per sample of a ready step. Raises StepConflict while it is not ready."""
        groups = self.scheduler.batch(step)
        if step not in self._tables:
            sources = [self._record(group.id).source for group in groups]
            metrics = self.scheduler.progress.metrics | self._engine_metrics()
            if self._cfg.rollout.environment is not None:
                metrics |= turn_metrics([sample for group in groups for sample in group.samples])
            self._tables = {step: RolloutTable.of(groups, sources, metrics)}
        return self._tables[step]

    def samples(self, step: int, indices: Sequence[int]) -> list[Sample]:
        """Rows of the table, whole. Raises StepConflict while the step is not ready."""
        rows = [sample for group in self.scheduler.batch(step) for sample in group.samples]
        return [rows[i] for i in indices]

    async def done(self, step: int, gaps: Gaps | None = None) -> None:
        """The step was trained on: write it down and free its slots. `gaps`: of the samples, by row of the table.

        Raises StepConflict while the step is not ready.
        """
        batch = set(self.scheduler.ready(step).batch)
        groups = self.scheduler.retire(step)
        number = step + 1  # as metrics and checkpoints count: training on batch k completes step k + 1
        self._ledger.write(Entry.of(number, groups, batch))
        log.info("step %d: trained; ledger %s", step, self.ledger)
        if self._routes:
            self._routes.remove_later()
        if self._cfg.logging.dump_rollouts:
            path = rollout_file(self._cfg.run_dir, number)
            records = [self._record(group.id) for group in groups]
            await asyncio.to_thread(write_dump, path, number, groups, records, self._prompts.tokenizer, batch, gaps)

    def _engine_metrics(self) -> dict[str, float]:
        """Since the last batch: what became of the engines."""
        pids, (fewest, outages) = self._pids_of_engines(), self._client.replicas.tally()
        restarts = sum(self._engine_pids.get(url, pid) != pid for url, pid in pids.items())
        self._engine_pids |= pids
        retries, self._client.transport_errors = self._client.transport_errors, 0
        found = {"engines_serving": fewest, "engine_outages": outages, "engine_restarts": restarts, "retries": retries}
        return {f"system/{name}": float(count) for name, count in found.items()}

    def _pids_of_engines(self) -> dict[str, int]:
        return engine_pids(self._cfg.run_dir, [*self._client.replicas.states]) if not self._cfg.engine.urls else {}

    @property
    def ledger(self) -> dict[str, int]:
        """What became of every prompt drawn; `rejected` prompts are too long and never drawn."""
        return self.scheduler.pool.ledger | {"rejected": self._prompts.rejected}

    async def save_state(self) -> bytes:
        """Everything that a resumed run needs as one safetensors blob, once all files that it refers to are durable.

        Raises OSError.
        """
        state, groups = self.scheduler.state_dict()
        arrays, values = pack_groups(groups)
        blob = encode(arrays, {"state": state, "groups": values, "rejected": self._prompts.rejected})
        if self._routes:
            await self._routes.keep(state["step"], groups)
        return blob

    def restore_state(self, blob: bytes) -> None:
        """Go on from `save_state`. Raises StepConflict after sampling began, DataError for other prompts."""
        arrays, metadata = decode(blob)
        groups = unpack_groups(arrays, metadata["groups"])
        if self._routes:
            self._routes.forget_lost(groups)
        self.scheduler.load_state_dict(metadata["state"], groups)
        step = self.scheduler.progress.step
        self._ledger.truncate_after(step)
        remove_dumps_from(self._cfg.run_dir, step + 1)
        log.info("restored at step %d; ledger %s", step, self.ledger)

    def _record(self, group_id: int) -> PromptRecord:
        return self._prompts.train[self.scheduler.pool.record_index(group_id)]


def run_controller(cfg: Config, host: str = "127.0.0.1", outlive_term: bool = False) -> None:
    """Process entry: serve until SIGTERM or SIGINT. `host` is the address to listen on.

    With `outlive_term`, SIGTERM does nothing: where all processes of a run get it, a trainer still has to fetch the
    controller's state for its checkpoint.

    Exits with status 1 when it cannot start (prompts, verifiers, engines); the last line of its log says why.
    """
    setup_logging("controller", 0, cfg.logging.level)  # stderr is the role's log file already
    look_less_often()
    try:
        asyncio.run(_until_signal(cfg, host, outlive_term))
    except (DataError, RewardError, ConfigError, TimeoutError, OSError) as error:
        log.error("cannot go on: %s", error)
        sys.exit(1)


async def _until_signal(cfg: Config, host: str, outlive_term: bool) -> None:
    shutdown, loop = asyncio.Event(), asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, shutdown.set)
    on_term = (lambda: log.info("TERM: going on until the trainer has saved")) if outlive_term else shutdown.set
    loop.add_signal_handler(signal.SIGTERM, on_term)
    await serve(cfg, host, shutdown)


async def serve(cfg: Config, host: str, shutdown: asyncio.Event) -> None:
    """Load, bind, publish, run the loops until `shutdown` is set, and clean up whatever ends them."""
    prompts = Prompts(cfg)
    try:
        urls = await _urls_of_engines(cfg, shutdown)
    except _ShutDown:
        return
    async with (
        connect_run(cfg, urls) as client,
        RewardPool(cfg.reward) as verifiers,
        open_turns(client, prompts.tokenizer, cfg.rollout) as turns,
    ):
        controller = Controller(cfg, prompts, client, verifiers, turns)
        log.info("%d prompts, %d rejected as too long; engines %s", len(prompts.train), prompts.rejected, urls)
        await _serve_http(cfg, controller, host, shutdown)


class _ShutDown(Exception):
    """The controller is to end before its engines have come up."""


async def _urls_of_engines(cfg: Config, shutdown: asyncio.Event) -> list[str]:
    """Raises _ShutDown when `shutdown` is set first: a thread cannot be cancelled, so its pauses look."""

    def pause(seconds: float) -> None:
        if shutdown.is_set():
            raise _ShutDown
        time.sleep(seconds)

    return await asyncio.to_thread(engine_urls, cfg, pause)


async def _serve_http(cfg: Config, controller: Controller, host: str, shutdown: asyncio.Event) -> None:
    token = secrets.token_urlsafe(32)
    runner = web.AppRunner(build_app(controller, token), access_log=None, shutdown_timeout=GRACE_S)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, 0).start()
        name = socket.gethostname() if host in ("0.0.0.0", "::") else host
        url = f"http://{name}:{runner.addresses[0][1]}"
        published = publish(cfg.run_dir, Endpoint(url, os.getpid(), token))
        log.info("listening on %s", url)
        try:
            await _run_until(controller, shutdown)
        finally:
            published.unlink(missing_ok=True)
    finally:
        await runner.cleanup()


async def _run_until(controller: Controller, shutdown: asyncio.Event) -> None:
    loops = asyncio.create_task(controller.run())
    stop = asyncio.create_task(shutdown.wait())
    await asyncio.wait({loops, stop}, return_when=asyncio.FIRST_COMPLETED)
    for task in (loops, stop):
        task.cancel()
    results = await asyncio.gather(loops, stop, return_exceptions=True)
    if isinstance(results[0], Exception):
        raise results[0]
