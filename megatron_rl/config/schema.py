"""The whole configuration: the sections together. Checks across sections are in `checks.py`."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from .algorithm import PRESET_DYNAMIC_SAMPLING, PRESET_OVERLONG_SHARE, AlgorithmConfig
from .base import Section
from .checkpoint import CheckpointConfig
from .cluster import ClusterConfig
from .data import DataConfig
from .engine import EngineConfig
from .evaluation import EvalConfig
from .logs import LoggingConfig
from .loss import LossConfig
from .model import ModelConfig
from .moe import MoeConfig
from .optimizer import OptimizerConfig
from .parallel import ParallelConfig
from .reward import RewardConfig
from .rollout import RolloutConfig
from .sft import SftConfig


class Config(Section):
    """One run."""

    name: str = "run"
    """Name shown in logs and reports."""
    run_dir: str = Field(min_length=1)
    """Directory of everything that the run writes."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Seed of sampling, shuffling and initialisation."""
    steps: int = Field(100, ge=0)
    """RL steps (one rollout batch each)."""
    deterministic: bool = False
    """Fixed kernel shapes in the embedded engine, so that a resumed run repeats the uninterrupted one exactly."""
    vars: dict[str, str] = Field(default_factory=dict)
    """Free names, to be used in other values as ${vars.NAME}."""
    model: ModelConfig
    parallel: ParallelConfig = ParallelConfig()
    moe: MoeConfig = MoeConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    loss: LossConfig = LossConfig()
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    engine: EngineConfig = EngineConfig()
    reward: RewardConfig
    sft: SftConfig = SftConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    cluster: ClusterConfig = ClusterConfig()
    logging: LoggingConfig = LoggingConfig()

    @property
    def one_engine_is_enough(self) -> bool:
        """Whether the run goes on with those of its engines that serve, when others fail for good."""
        return self.cluster.placement != "colocated" and self.engine.nodes_per_replica == 1

    @model_validator(mode="before")
    @classmethod
    def _sections_reach_each_other(cls, values: Any) -> Any:
        """A preset brings its way of sampling and shaping (DAPO: refill, overlong), and older tokens are corrected
        (tis), unless the user says what else is to be done.
        """
        if not isinstance(values, dict):
            return values
        algorithm, rollout = values.get("algorithm", {}), values.get("rollout", {})
        if not isinstance(algorithm, dict) or not isinstance(rollout, dict):
            return values
        preset = str(algorithm.get("preset", "dapo"))
        brought: dict[str, Any] = {"dynamic_sampling": PRESET_DYNAMIC_SAMPLING.get(preset, "off")}
        longest = rollout.get("max_response_tokens", RolloutConfig.model_fields["max_response_tokens"].default)
        if preset in PRESET_OVERLONG_SHARE and isinstance(longest, int) and not rollout.get("overlong_filter"):
            brought["overlong_cache"] = max(1, int(PRESET_OVERLONG_SHARE[preset] * longest))
        off_policy = rollout.get("mode", "sync") != "sync" or rollout.get("partial_rollouts") is True
        if off_policy and algorithm.get("old_logprobs") != "rollout":
            algorithm = {"corrections": ["tis"], **algorithm}
        return values | {"algorithm": algorithm, "rollout": brought | rollout}
