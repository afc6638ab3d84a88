"""Runs one MoE update under a layout, and reports which experts the dispatcher really used; holds no tests.

Two models share a shape: `engine` sampled and computed old log-probs, `moved` is the same after some training. What the
dispatcher is handed (not what is replayed) is looked at, row by row, and put on the token axis of the whole batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_rl.algorithms.spec import LossSpec
from megatron_rl.config import Config
from megatron_rl.config.moe import MoeConfig
from megatron_rl.policy.batch import SequenceBatch
from megatron_rl.policy.microbatch import Plan, plan_microbatches
from megatron_rl.policy.routes import ArrayRoutes
from tests.parallel.policy_setup import gradients, layout, make_batch, make_config
from tests.tiny import Family, tiny_model

if TYPE_CHECKING:
    from megatron_rl.policy.policy import Policy

VOCAB, LAYERS, EXPERTS, TOP_K = 300, 4, 8, 2
FAMILIES: tuple[Family, ...] = ("qwen3_moe", "deepseek_v3")
"""Softmax over the chosen; and sigmoid, groups, a bias for choosing, and a first layer without experts."""
SPEC = LossSpec(kind="gspo", eps_low=0.5, eps_high=0.5)
MODES = ("off", "R2", "R3")
ENGINE_SHARE = 0.7
"""Rows in which the engine chose as the trainer would."""


@dataclass(frozen=True)
class Case:
    """A layout; a cap of 48 tokens makes several micro-batches."""

    parallel: dict[str, Any]
    family: Family = "qwen3_moe"
    max_tokens: int = 48
    modes: tuple[str, ...] = MODES
    dtype: str = "float32"


@dataclass
class Used:
    """What dispatchers were given in one pass, by row of the whole batch.

    Attributes:
        count: int64 [MoE layers, T], how often a token was routed.
        sets: bool [MoE layers, T, experts], where to.
    """

    count: np.ndarray
    sets: np.ndarray

    @classmethod
    def empty(cls, layers: int, tokens: int) -> Used:
        return cls(np.zeros((layers, tokens), np.int64), np.zeros((layers, tokens, EXPERTS), np.bool_))

    def __add__(self, other: Used) -> Used:
        return Used(self.count + other.count, self.sets | other.sets)


def write_models(folder: Path, family: Family, **sizes: int) -> dict[str, str]:
    """`engine`, and `moved`: every matrix of a layer some percent away, the routers further."""
    import torch
    from safetensors.torch import load_file, save_file

    paths = {
        name: tiny_model(folder / family / name, family, vocab_size=VOCAB, layers=LAYERS, **sizes)
        for name in ("engine", "moved")
    }
    weights = load_file(paths["moved"] / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    for name, tensor in sorted(weights.items()):
        noise = torch.randn(tensor.shape, generator=generator) * tensor.std()
        tensor.add_(noise, alpha=0.3 if name.endswith("mlp.gate.weight") else 0.03)
    save_file(weights, paths["moved"] / "model.safetensors", metadata={"format": "pt"})
    return {name: str(path) for name, path in paths.items()}


def whole_batch() -> SequenceBatch:
    return make_batch(VOCAB, count=8)


def run_cases(paths: dict[str, dict[str, str]], cases: dict[str, Case]) -> dict[str, Any]:
    """In a rank: the reference of each family, one rank alone with one micro-batch, then every case."""
    from megatron_rl.policy import distributed

    batch = whole_batch()
    routes: dict[str, np.ndarray] = {}
    found: dict[str, Any] = {}
    references = {case.family: Case({}, case.family, max_tokens=4096, dtype=case.dtype) for case in cases.values()}
    for name, case in (references | cases).items():
        models = paths[case.family]
        cfg = make_config(models["engine"], {"use_distributed_optimizer": False} | case.parallel, case.dtype)
        with layout(cfg, alone=name in references) as dp_rank:
            runner = Runner(cfg, models, batch, case, dp_rank)
            if name in references:
                routes[name] = engine_routes(batch, runner.live_sets())
            found[name] = {"engine_routes": routes[case.family], **runner.run(routes[case.family])}
    distributed.shutdown()
    return found


def engine_routes(batch: SequenceBatch, live: np.ndarray) -> np.ndarray:
    """int16 [layers, T, k], what an engine returns: mostly the trainer's choice, none of some rows.

    A last token was never read; nothing is known of two tokens, as if a tool had put them in, and of a whole sequence.
    """
    rng = np.random.default_rng(7)
    other = rng.permuted(np.broadcast_to(np.arange(EXPERTS), (*live.shape[:2], EXPERTS)), axis=-1)[..., :TOP_K]
    routes = np.where(rng.random((*live.shape[:2], 1)) < ENGINE_SHARE, live, other).astype(np.int16)
    routes[:, batch.offsets[1:] - 1] = -1
    routes[:, batch.offsets[0] + 2 : batch.offsets[0] + 4] = -1
    routes[:, batch.offsets[3] : batch.offsets[4]] = -1
    return routes


class Runner:
    """One policy in one layout."""

    def __init__(self, cfg: Config, paths: dict[str, str], whole: SequenceBatch, case: Case, dp_rank: int) -> None:
        from megatron_rl.policy.policy import Policy

        self.cfg, self.paths, self.whole, self.case = cfg, paths, whole, case
        self.is_alone = cfg.parallel.world_size == 1
        self.policy: Policy = Policy.build(cfg)
        parallel = cfg.parallel
        self.plan: Plan = plan_microbatches(
            whole.lengths,
            parallel.data_parallel_size,
            case.max_tokens,
            parallel.microbatch_multiple,
            sequence_multiple=parallel.sequence_multiple,
        )
        self.moe_layers = self.policy.hf.moe_layers
        self.sequences = list(self.plan.sequences(dp_rank))
        self.batch = whole.select(self.sequences)

    def live_sets(self) -> np.ndarray:
        """int16 [layers, T, k] of the engine's model, -1 on last tokens; one rank alone."""
        routes = self.policy.log_probs(self.batch, self.plan).old_routes
        assert routes is not None
        layers = range(len(self.moe_layers))
        found = np.full((len(layers), self.batch.num_tokens, TOP_K), -1, np.int16)
        for i, (begin, end) in enumerate(zip(self.batch.offsets[:-1], self.batch.offsets[1:], strict=True)):
            found[:, begin : end - 1] = routes.rows(i, layers, 0, end - begin - 1)
        return found

    def run(self, routes: np.ndarray) -> dict[str, Any]:
        held = ArrayRoutes(range(len(routes)), self.whole.offsets, np.arange(self.whole.num_tokens), routes)
        self.batch = replace(self.batch, routes=held.select(self.sequences))
        return {mode: self._mode(mode) for mode in self.case.modes}

    def _mode(self, mode: str) -> dict[str, Any]:
        """Old log-probs with the engine's weights; then one update with them, and one with those that moved."""
        from megatron_rl.policy.routing import Routers

        moe = MoeConfig(routing_replay=mode, max_routing_mismatch=0.3)
        self.policy._routers = Routers(self.policy.chunks, self.policy.hf, self.cfg.model_copy(update={"moe": moe}))
        self._load("engine")
        with self._watched() as old_use:
            old = self.policy.log_probs(self.batch, self.plan)
        batch = self.batch.with_arrays(
            old_log_probs=old.log_probs, old_routes=old.old_routes, routing_mismatch=old.routing_mismatch
        )
        same = self.policy.train_step(batch, self.plan, SPEC)
        self._load("moved")
        with self._watched() as use:
            result = self.policy.train_step(batch, self.plan, SPEC)
        return {
            "sequences": self.sequences,
            "old_use": old_use,
            "use": use,
            "mismatch": old.routing_mismatch,
            "log_probs": np.split(old.log_probs, self.batch.offsets[1:-1]),
            "old_metrics": old.metrics,
            "same_metrics": same,
            "metrics": result,
            "gradients": gradients(self.policy),
        } | (self._more(batch) if self.is_alone else {})

    def _more(self, batch: SequenceBatch) -> dict[str, Any]:
        """Of a rank alone: log-probs under the moved weights, and the same weights with other micro-batches."""
        self._load("moved")
        moved = self.policy.log_probs(batch, self.plan).log_probs
        self._load("engine")
        plan = plan_microbatches(batch.lengths, 1, 30)
        assert plan.num_microbatches > self.plan.num_microbatches
        return {
            "moved_log_probs": moved[batch.mask],
            "engine_log_probs": batch.old_log_probs[batch.mask],
            "other_microbatches": self.policy.train_step(batch, plan, SPEC),
        }

    def _load(self, name: str) -> None:
        from megatron_rl.weights.load import load_hf_weights

        load_hf_weights(self.policy.chunks, self.policy.hf, self.paths[name])
        self.policy.set_learning_rate(0.0)

    @contextmanager
    def _watched(self) -> Iterator[dict[str, Used]]:
        """Fills in `forward` and, where activations are recomputed, `recomputed`."""
        import torch

        calls: dict[tuple[int, bool], list[np.ndarray]] = defaultdict(list)
        watched = [m for chunk in self.policy.chunks for m in chunk.modules() if hasattr(m, "token_dispatcher")]

        def watch(layer: Any) -> None:
            dispatch = layer.token_dispatcher.dispatch_preprocess

            def looked_at(hidden: Any, routing_map: Any, probs: Any) -> Any:
                number = self.moe_layers.index(layer.layer_number - 1)
                calls[number, torch.is_grad_enabled()].append(routing_map.clone().cpu().numpy())
                return dispatch(hidden, routing_map, probs)

            layer.token_dispatcher.dispatch_preprocess = looked_at

        for layer in watched:
            watch(layer)
        use: dict[str, Used] = {}
        try:
            yield use
        finally:
            for layer in watched:
                del layer.token_dispatcher.dispatch_preprocess
        graded = {grad for _, grad in calls}
        for grad in sorted(graded):  # forward passes are those without gradient where both kinds occur
            name = "recomputed" if grad and len(graded) == 2 else "forward"
            use[name] = self._placed({layer: maps for (layer, kind), maps in calls.items() if kind is grad})

    def _placed(self, calls: dict[int, list[np.ndarray]]) -> Used:
        """Maps of every micro-batch, in order, on the token axis of the whole batch."""
        from megatron.core import parallel_state

        used = Used.empty(len(self.moe_layers), self.whole.num_tokens)
        shift = np.repeat(self.whole.offsets[self.sequences] - self.batch.offsets[:-1], self.batch.lengths)
        for layer, maps in calls.items():
            for microbatch, rows in zip(self.policy._pack(self.batch, self.plan), maps, strict=True):
                destination = microbatch.destination
                if self.cfg.parallel.sequence_parallel:
                    parts = np.split(destination, self.cfg.parallel.tensor_model_parallel_size)
                    destination = parts[parallel_state.get_tensor_model_parallel_rank()]
                real = destination >= 0
                place = destination[real] - 1
                place = place + shift[place]
                used.count[layer, place] += 1
                used.sets[layer, place] |= rows[real]
        return used
