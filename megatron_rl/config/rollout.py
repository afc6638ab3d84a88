"""Section `rollout:`, how samples are drawn from the engines and which of them are trained on."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from .base import Seconds, Section, YamlOff


def capacity_of(groups_per_step: int, oversample: float, max_staleness: int) -> int:
    """Groups alive at once.

    >>> capacity_of(32, 1.5, max_staleness=0)
    48
    """
    return math.ceil(oversample * groups_per_step) * (max_staleness + 1)


class RolloutConfig(Section):
    """Sampling, group formation, dynamic sampling, and the controller's deadlines."""

    groups_per_step: int = Field(32, ge=1)
    """Prompts whose groups make one training batch."""
    group_size: int = Field(16, ge=1, le=1000)
    """Samples drawn per prompt (G)."""
    max_prompt_tokens: int = Field(1024, ge=1)
    """Longest prompt, chat template included."""
    max_response_tokens: int = Field(8192, ge=1)
    """Longest response; with max_prompt_tokens it must fit the model's context."""
    temperature: float = Field(1.0, ge=1e-3, le=1e3)
    """Sampling temperature, used for all log-probs as well."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Must be 1 for training: the trainer's log-probs are those of the full distribution."""
    top_k: int = -1
    """Must be -1 (off) for training."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Must be 0 (off) for training."""
    dynamic_sampling: Annotated[Literal["off", "refill", "mask"], YamlOff] = "off"
    """Groups whose answers are all right or all wrong: kept, replaced by fresh ones, or masked out of the loss."""
    oversample: float = Field(1.0, ge=1, le=1000)
    """Groups at work at once for one batch, as a multiple of groups_per_step; with partial_rollouts as many responses
    as these have, of more groups; async: only as many as will be used."""
    max_sample_rounds: int = Field(10, ge=1)
    """Rounds of refilling before the run stops and shows the pass rates."""
    overlong_cache: int | None = Field(None, ge=1)
    """DAPO's soft punishment starts this many tokens before max_response_tokens; null = off."""
    overlong_scale: float = Field(1.0, gt=0, le=1e6)
    """Size of the soft punishment."""
    overlong_filter: bool = False
    """Take truncated responses out of the loss (they stay in the group's statistics)."""
    concurrency: int = Field(512, ge=1)
    """Sequences in flight at once, over all engines."""
    request_timeout_s: Seconds = 600.0
    """Deadline of one request (a segment), from sending to answer; and of waiting when no replica serves."""
    step_timeout_s: Seconds = 3600.0
    """Deadline of one step's rollouts."""
    retries: int = Field(3, ge=0)
    """Further attempts of a segment after replicas failed. An answer that can be read is never asked for twice. Where a
    replica fails at a request (HTTP 5xx, an unreadable answer), another one is asked; if that fails alike, or there is
    none, the run ends. HTTP 429 and 503 are asked again after pauses until request_timeout_s, however few retries."""
    client_workers: int | None = Field(None, ge=0, le=64)
    """Processes that talk to the engines; 0 = the controller itself; null = 0 with embedded engines, else
    cluster.controller_cpus."""
    segment_tokens: int = Field(2048, ge=1)
    """Longest part of a response that one request generates; a dead engine costs at most this much of each response."""

    mode: Literal["sync", "one_step_off", "async"] = "sync"
    """`sync`: generate, then train; `one_step_off`: generate a batch while the one before is trained on; `async`:
    generate all the time, through weight updates."""
    partial_rollouts: bool = False
    """When a batch is complete, keep what unfinished responses have and go on with them later. `async` always does."""
    max_staleness: int = Field(2, ge=0)
    """Published weight versions that a token may be behind when it is trained on; sync without partial_rollouts: 0."""
    stale_policy: Literal["drop", "mask_stale_tokens", "keep_with_correction"] = "drop"
    """Groups with older tokens: generated anew, without these tokens in the loss, or left to algorithm.corrections."""
    mask_off_policy_tokens: bool = False
    """Take every token out of the loss that the newest weights have not sampled."""

    environment: str | None = None
    """`module:Class` of an environment that answers the model between its turns; null = one turn."""
    environment_args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of that class."""
    environment_timeout_s: Seconds = 30.0
    """Deadline of one call to the environment."""
    environment_workers: int = Field(2, ge=1, le=64)
    """Processes in which environments run; each serves one call at a time."""
    max_turns: int = Field(8, ge=1)
    """Turns of the model in one response, with an environment."""
    max_turn_tokens: int | None = Field(None, ge=1)
    """Longest turn; null = as long as the response may be."""

    @model_validator(mode="before")
    @classmethod
    def _synchronous_is_never_stale(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("mode", "sync") == "sync" and not values.get("partial_rollouts"):
            return {"max_staleness": 0, **values}
        return values

    @property
    def longest_sequence(self) -> int:
        """Tokens of prompt and response together, at most."""
        return self.max_prompt_tokens + self.max_response_tokens

    @property
    def samples_per_step(self) -> int:
        """Samples of one training batch."""
        return self.groups_per_step * self.group_size

    @property
    def off_policy(self) -> bool:
        """Whether a batch may hold tokens of older weights than those that are trained."""
        return self.mode != "sync" or self.partial_rollouts

    @model_validator(mode="after")
    def _trainable(self) -> RolloutConfig:
        for key, neutral in (("top_p", 1.0), ("top_k", -1), ("min_p", 0.0)):
            if getattr(self, key) != neutral:
                raise ValueError(
                    f"{key}={getattr(self, key)}: tokens sampled from a filtered distribution have other log-probs "
                    f"than the trainer computes; set {key}={neutral}"
                )
        if self.overlong_cache is not None and self.overlong_cache > self.max_response_tokens:
            raise ValueError(
                f"overlong_cache={self.overlong_cache} is longer than max_response_tokens={self.max_response_tokens}; "
                "use 1 .. max_response_tokens, or null to switch it off"
            )
        return self

    @model_validator(mode="after")
    def _staleness(self) -> RolloutConfig:
        if not self.off_policy and self.max_staleness:
            raise ValueError(
                f"max_staleness={self.max_staleness}: mode=sync trains on tokens of the newest weights only; leave it "
                "out, or set partial_rollouts=true, mode=one_step_off or mode=async"
            )
        if self.off_policy and not self.max_staleness:
            what = f"mode={self.mode}" if self.mode != "sync" else "partial_rollouts=true"
            raise ValueError(f"max_staleness=0: {what} needs tokens of older weights; use 1 or more (2 is usual)")
        for key, neutral in (("stale_policy", "drop"), ("mask_off_policy_tokens", False)):
            if not self.off_policy and getattr(self, key) != neutral:
                raise ValueError(f"{key}={getattr(self, key)} has no effect with mode=sync; leave it out")
        if self.mode != "sync" and self.mask_off_policy_tokens:
            raise ValueError(
                f"mask_off_policy_tokens=true with mode={self.mode}: its batches may hold no token of the newest "
                "weights, and none would be left in the loss; leave it out, or use mode=sync with partial_rollouts=true"
            )
        return self

    @model_validator(mode="after")
    def _turns(self) -> RolloutConfig:
        if self.environment is not None and not re.fullmatch(r"[\w.]+:\w+", self.environment):
            raise ValueError(
                f"environment={self.environment!r} should be module:Class, such as guessing:HigherOrLower, with one "
                "colon before the class"
            )
        for key in ("environment_args", "environment_timeout_s", "environment_workers", "max_turns", "max_turn_tokens"):
            value = getattr(self, key)
            default = type(self).model_fields[key].get_default(call_default_factory=True)
            if self.environment is None and value != default:
                raise ValueError(
                    f"{key}={value} without environment: there is one turn, of max_response_tokens; set "
                    "environment=module:Class, or leave it out"
                )
        return self
