"""Puts a run's ledger beside its prompts and its newest checkpoint; the rules are in `rollout.ledger`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_rl.cluster.run_dir import RunDir
from megatron_rl.config import Config, load_config
from megatron_rl.data import PromptCursor
from megatron_rl.policy import checkpoint
from megatron_rl.rollout.controller import Prompts
from megatron_rl.rollout.ledger import Audit, Ledger, LedgerError, audit
from megatron_rl.rollout.wire import decode


def audit_run(run_dir: Path) -> Audit:
    """Check that no prompt of the run was lost or doubled. Reads only; may be called while the run goes on.

    Raises:
        ConfigError, DataError: RUN/config.yaml or the prompts cannot be read as they were.
        CheckpointError: the newest checkpoint is damaged.
        LedgerError: a damaged ledger, or not the directory of a run.
    """
    if not RunDir(run_dir).config.is_file():
        raise LedgerError(f"{run_dir} is not the directory of a run: it has no config.yaml; give the run_dir of one")
    cfg = load_config(RunDir(run_dir).config)
    prompts = Prompts(cfg)
    newest = checkpoint.latest(run_dir)
    if newest is None:
        books, step, cursor = None, 0, cursor_of(cfg, prompts)
    else:
        checkpoint.verify(newest)
        books, step = saved_books(newest), checkpoint.step_of(newest)
        cursor = cursor_of(cfg, prompts, books)
    ids = [record.id for record in prompts.train]
    return audit(Ledger(run_dir).read(), cursor, ids, prompts.rejected, books, step)


def cursor_of(cfg: Config, prompts: Prompts, books: dict[str, Any] | None = None) -> PromptCursor:
    """The cursor that deals `prompts`, at its place by the `saved_books`. Raises DataError when those are of others."""
    cursor = PromptCursor(len(prompts.train), cfg.seed, cfg.data.shuffle, prompts.train.fingerprint)
    if books is not None:
        cursor.load_state_dict(books["cursor"])
    return cursor


def saved_books(folder: Path) -> dict[str, Any]:
    """What the controller knew of its prompts when the checkpoint in `folder` was written."""
    _, metadata = decode(checkpoint.read_extra(folder)["controller"])
    books = metadata["state"]["pool"]
    unfinished = books["partial"]  # those are among the waiting
    return books | {"finished": [g["id"] for g in metadata["groups"] if g["id"] not in unfinished]}
