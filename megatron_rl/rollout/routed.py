"""Routes of experts in an engine's answer: base64 to checked rows. Where rows are kept is known to `routes`.

SGLang sends int32 [tokens, layers of the model, top_k], of the tokens that were read since `routed_experts_start_len`:
all of the prompt and the response but the last. Layers with an ordinary MLP have an entry, too, which means nothing.
"""

from __future__ import annotations

import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pybase64

from megatron_rl.routes import RouteStore
from megatron_rl.routes.store import Rows, holds_doubled, id_dtype

from .protocol import Prompt

if TYPE_CHECKING:  # a client worker loads no settings
    from megatron_rl.config import Config, HfConfig


@dataclass(frozen=True)
class RouteFormat:
    """What routes of a model look like, and the folder in which a run keeps them.

    `moe_layers` are those of the model's `num_layers`, from 0, that have experts.
    """

    folder: str
    num_layers: int
    moe_layers: Sequence[int]
    top_k: int
    num_experts: int

    @classmethod
    def of(cls, cfg: Config, hf: HfConfig) -> RouteFormat | None:
        """Of a run's policy; None where nothing is kept (`engine.routed_experts`)."""
        if not cfg.engine.routed_experts or hf.moe is None:
            return None
        folder = Path(cfg.run_dir).absolute() / "routes"
        return cls(str(folder), hf.num_layers, hf.moe_layers, hf.moe.top_k, hf.moe.num_experts)

    def store(self) -> RouteStore:
        """Where they are kept."""
        return RouteStore(self.folder, len(self.moe_layers), self.top_k, self.num_experts)

    def rows(self, text: str | bytes | memoryview, count: int) -> Rows:
        """Decode routes of `count` tokens: uint8 or int16 [count, MoE layers, top_k].

        Raises:
            ValueError: not base64, another number of tokens, layers or experts, an id that no expert has, or an expert
                twice for one token. The message goes on a sentence about the field.
        """
        try:
            values = np.frombuffer(pybase64.b64decode(text, validate=True), np.int32)
        except (binascii.Error, ValueError) as error:
            raise ValueError(f"is not base64 of int32 numbers ({error})") from error
        each = self.num_layers * self.top_k
        if values.size != count * each:
            if values.size % each == 0 and (not count or values.size % count):
                found = f"{values.size // each} rows for {count} tokens"
            else:
                found = f"{values.size // count} a token" if count and values.size % count == 0 else "no whole rows"
            raise ValueError(
                f"holds other routes than were asked for: {found}; {count} tokens x {self.num_layers} layers x top-"
                f"{self.top_k} = {each} a token are expected, {values.size} numbers came; does this engine serve "
                "another model or version?"
            )
        layers = values.reshape(count, self.num_layers, self.top_k)[:, self._chosen]
        if layers.size and int(layers.view(np.uint32).max()) >= self.num_experts:
            wrong = layers[layers.view(np.uint32) >= self.num_experts][0]
            raise ValueError(f"holds expert {wrong}, of {self.num_experts}; does this engine serve another model?")
        narrow = layers.astype(id_dtype(self.num_experts))
        if holds_doubled(narrow):
            raise ValueError("holds an expert twice for one token, which no router chooses; the engine is broken")
        return narrow

    @property
    def _chosen(self) -> slice | list[int]:
        """A slice where possible, which copies nothing."""
        first, last = self.moe_layers[0], self.moe_layers[-1]
        return slice(first, last + 1) if last - first + 1 == len(self.moe_layers) else list(self.moe_layers)


def rows_wanted(prompt: Prompt, generated: int) -> int:
    """Tokens whose routes an answer of `generated` tokens must report."""
    return len(prompt.tokens) + generated - 1 - prompt.routed
