"""What can be checked of a run's inputs before any of its processes starts: weights, prompts, verifiers, packages.

Seconds on the login node instead of an error after hours in the queue. The configuration itself is checked in `config`.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from megatron_rl.audit import cursor_of, saved_books
from megatron_rl.config import Config, ConfigError, HfConfig, check, read_hf_config
from megatron_rl.config.quantised import stored_in_blocks
from megatron_rl.data import DataError, PromptDataset, TurnFrame, check_targets
from megatron_rl.engines.sglang_install import SglangError, find_python, require_tested
from megatron_rl.policy import checkpoint
from megatron_rl.rewards.pool import RewardPool
from megatron_rl.rewards.registry import RewardError, load_verifier
from megatron_rl.rollout.controller import Prompts
from megatron_rl.rollout.environment import load_environment, role_of

INPUT_ERRORS = (DataError, RewardError)
"""What a wrong input raises, beside `ConfigError`; each message is complete."""


@dataclass(frozen=True)
class Inputs:
    """What was read on the way: the model's facts, and the prompts."""

    hf: HfConfig
    prompts: Prompts


def check_inputs(cfg: Config) -> Inputs:
    """Read every prompt, tokenise it and measure it; load verifiers and environment, and try a loss of one's own.

    Raises:
        ConfigError: a value that cannot run, with all others found; weights that do not fit the model's config.json; a
            package or the SGLang that it needs is not installed; a function named by algorithm.loss that is no loss; a
            class that is no environment.
        DataError: a bad line (file:line), a prompt longer than rollout.max_prompt_tokens, a supervised example longer
            than the model's context or a micro-batch, no chat template, or one that cannot hold an environment's text.
        RewardError: an unknown verifier, or one that cannot be called as the configuration says.
    """
    hf = check(cfg)
    _check_weights(cfg, hf)
    if cfg.logging.wandb and find_spec("wandb") is None:
        raise ConfigError(
            "logging.wandb=true needs the package wandb, which is not installed: run "
            "`pip install 'megatron-rl[wandb]'`, or set logging.wandb=false"
        )
    prompts = Prompts(cfg)
    if cfg.sft.data is not None:
        examples = PromptDataset.load(cfg.sft.data, require=("target",))
        cap = cfg.algorithm.max_tokens_per_microbatch
        bounds = ((hf.max_position_embeddings, "the model's context"), (cap, "algorithm.max_tokens_per_microbatch"))
        check_targets(examples, prompts.tokenizer, *min(bounds))
    if cfg.engine.kind == "sglang" and not cfg.engine.urls:
        try:
            require_tested(find_python(cfg.engine.python), cfg.engine.untested_version)
        except SglangError as error:
            raise ConfigError(str(error)) from error
    RewardPool(cfg.reward)  # refuses verifiers that need processes of their own when there are none
    for component in cfg.reward.components:
        load_verifier(component.name, component.args)
    if cfg.rollout.environment is not None:
        environment = load_environment(cfg.rollout.environment, cfg.rollout.environment_args)
        TurnFrame(prompts.tokenizer, role_of(environment))
    if ":" in cfg.algorithm.loss:
        _try_loss(cfg)
    return Inputs(hf, prompts)


def check_plan(cfg: Config) -> tuple[HfConfig, str]:
    """What a plan needs: the model's facts, and which inputs were not checked, in words.

    Where the model's directory holds no weights, as on a laptop, only the configuration is checked.

    Raises:
        ConfigError, DataError, RewardError: as `check_inputs`.
    """
    folder = Path(cfg.model.path)
    if any(folder.glob("*.safetensors*")) or not (folder / "config.json").is_file():
        return check_inputs(cfg).hf, ""
    return check(cfg, with_files=False), f"{folder} holds no weights: neither model files nor prompts were checked"


def _check_weights(cfg: Config, hf: HfConfig) -> None:
    """From headers, as every rank does before it loads them; here alone, once, what a tied output layer holds."""
    from megatron_rl.weights import WeightsError, fp8
    from megatron_rl.weights.convert.views import check_tied
    from megatron_rl.weights.load import open_hf_weights  # torch, which takes seconds

    try:
        tensors = open_hf_weights(hf, cfg.model.path)
        check_tied(tensors, hf, cfg.model.path)
    except WeightsError as error:
        raise ConfigError(f"model.path: {error}") from error
    found = any(isinstance(tensor, fp8.Dequantised) for tensor in tensors.values())
    if found != stored_in_blocks(cfg.model.path):
        raise ConfigError(
            f"model.path: of {cfg.model.path}, only {'the weights are' if found else 'config.json says that it is'} in "
            "blocks of fp8: engines would read other numbers than the trainer; copy it and its config.json again"
        )


def _try_loss(cfg: Config) -> None:
    from megatron_rl.algorithms.losses.trial import try_loss  # torch, which takes seconds: only for a loss of one's own
    from megatron_rl.algorithms.spec import LossSpec

    try:
        try_loss(LossSpec.from_config(cfg.algorithm))
    except ValueError as error:
        raise ConfigError(f"algorithm.{error}") from error


def check_device(cfg: Config) -> None:
    """For ranks on this machine: raises ConfigError when CUDA is asked for and absent."""
    if cfg.cluster.device != "cuda":
        return  # torch, which knows, takes seconds to import
    from megatron_rl.policy.distributed import cuda_problem

    problem = cuda_problem(cfg.parallel.world_size or 1)
    if problem is not None:
        raise ConfigError(problem)


def checkpoint_to_resume(cfg: Config, prompts: Prompts, step: int | None) -> Path | None:
    """The checkpoint of `step`, or the newest one; None when the run has not saved any yet.

    Raises:
        CheckpointError: there is none of that step, it is damaged, or it is of another model; the message names it.
        DataError: the run has dealt from other prompts than `prompts`, or in another order.
    """
    found = checkpoint.latest(Path(cfg.run_dir)) if step is None else checkpoint.at(Path(cfg.run_dir), step)
    if found is not None:
        manifest = checkpoint.verify(found)
        checkpoint.require_model(found, manifest, read_hf_config(cfg.model.path).shape, cfg.model.path)
        try:
            cursor_of(cfg, prompts, saved_books(found))
        except DataError as error:
            raise DataError(f"data.prompts={cfg.data.prompts} does not go on with {found}: {error}") from error
    return found
