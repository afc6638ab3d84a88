"""Section `moe:`, how a mixture-of-experts policy is routed during training. Its layout over ranks is `parallel:`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .base import Section, YamlOff


class MoeConfig(Section):
    """Routing of mixture-of-experts models; without meaning for dense ones.

    Load is not balanced during RL: there is no auxiliary loss, and expert biases stay as they were loaded.
    """

    routing_replay: Annotated[Literal["off", "R2", "R3"], YamlOff] = "off"
    """Which experts training uses for a token: those that it chooses itself, those of the pass for the old log-probs
    (`R2`), or those that the engine used when it sampled (`R3`). Weights always come from the live router."""
    max_routing_mismatch: float | None = Field(None, ge=0, le=1)
    """Responses are taken out of the loss whose share of (token, layer) with other experts in the engine than the
    trainer would choose is larger; needs the routes of the engine. null = none."""
