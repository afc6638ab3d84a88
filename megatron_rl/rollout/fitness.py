"""Whether an engine can serve a run at all, by what it says of itself. Who asks it, and when, is in `replicas.py`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class ExpectedModel:
    """What the run's model is like; a replica that says otherwise serves another one."""

    vocab_size: int
    hidden_size: int
    routed_experts: bool = False
    """Whether answers must say which experts each token was routed to."""


class Unfit(Exception):
    """The replica answers and must not serve; the text says why."""


class Misfit(Unfit):
    """It was started for another model, without a flag or with another key: no waiting changes that."""


def require_model(info: Mapping[str, Any], expected: ExpectedModel) -> None:
    """Compare what /model_info tells, or the config.json of the directory that it names, with the run's model.

    Servers name the directory only; one that cannot be read from here is taken at its word. Raises Misfit.
    """
    facts = dict(info)
    with suppress(OSError, ValueError):
        facts |= json.loads((Path(str(info.get("model_path"))) / "config.json").read_text())
    for name in ("vocab_size", "hidden_size"):
        found, wanted = facts.get(name), getattr(expected, name)
        if found is not None and found != wanted:
            raise Misfit(
                f"serves another model: {name}={found} ({info.get('model_path')}), the run's model.path has {wanted}; "
                "start it with the run's model"
            )


def require_routed_experts(server_info: Mapping[str, Any]) -> None:
    """Without its flag SGLang ignores the wish for routes in silence. Raises Misfit."""
    if not server_info.get("enable_return_routed_experts"):
        raise Misfit(
            "does not report routed experts, but engine.routed_experts=true asks for them; start it with "
            "--enable-return-routed-experts, or set engine.routed_experts=false"
        )
