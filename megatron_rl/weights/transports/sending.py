"""What broadcast and ipc have in common: a policy, engines behind HTTP, messages between ranks; it sends nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from megatron_rl.weights.export import ExportPlan, plan_export
from megatron_rl.weights.place import Place
from megatron_rl.weights.transports import Engines
from megatron_rl.weights.transports.mail import Mail, Store

if TYPE_CHECKING:
    from megatron_rl.config import HfConfig


@dataclass(frozen=True)
class Settings:
    """How to send: in which dtype the weights leave, and how many bytes at once (see `plan_export`)."""

    dtype: torch.dtype
    bucket_bytes: int


class Sending:
    """A transport without files; see `Transport`.

    Args:
        chunks: this rank's model chunks, with up-to-date parameters.
        settings: how to send.
        engines: HTTP, used on the ranks that send.
        store: shared by all ranks.
        interrupted: whether this rank was told to end.
    """

    in_session = True
    everywhere = False
    """Every rank needs the whole tensors, not only the first of each stage."""

    def __init__(
        self,
        chunks: Sequence[Any],
        hf: HfConfig,
        settings: Settings,
        engines: Engines,
        store: Store,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> None:
        self._chunks, self._hf = chunks, hf
        self._settings = settings
        self._engines, self._interrupted = engines, interrupted
        self._mail, self._epoch = Mail(store, f"weights/{type(self).__name__}"), 0
        self._place = Place.of_this_rank(self.everywhere)

    def prepare(self, version: int) -> None:
        """Nothing: tensors are gathered while they are sent."""

    def _plan(self) -> ExportPlan:
        return plan_export(self._chunks, self._hf, self._settings.dtype, self._settings.bucket_bytes)
