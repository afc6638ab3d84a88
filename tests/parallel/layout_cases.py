"""Which layouts are compared with one rank, and with what else each is combined; runs nothing and holds no tests.

Layouts, losses and splits multiply to some 100,000 combinations. `cover` picks few of them in which every pair of
values of two different factors still occurs: a fault that needs two settings to show itself is met at least once.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from megatron_rl.algorithms.normalisation import NORMALISATIONS
from megatron_rl.policy.microbatch import Plan
from tests.loss_recipes import CORRECTIONS, LOSSES, SEQUENCE_LEVEL
from tests.parallel.policy_setup import CP2, DP2, DP4, PP2, SP, TP2, VPP2
from tests.reference_loss import Recipe

LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    2: {"TP2": TP2, "TP2 SP": TP2 | SP, "PP2": PP2, "PP2 VPP2": VPP2, "DP2": DP2, "CP2": CP2},
    4: {
        "TP2 PP2": TP2 | PP2,
        "TP2 PP2 SP": TP2 | PP2 | SP,
        "TP2 PP2 VPP2": TP2 | VPP2,
        "PP2 DP2": PP2 | DP2,
        "PP2 VPP2 DP2": VPP2 | DP2,
        "TP2 DP2 SP": TP2 | DP2 | SP,
        "PP4": {"pipeline_model_parallel_size": 4},
        "DP4": DP4,
        "TP2 CP2 SP": TP2 | CP2 | SP,
        "PP2 CP2": PP2 | CP2,
        "CP2 DP2": CP2 | DP2,
        "CP4": {"context_parallel_size": 4},
    },
}
"""Processes -> name -> section `parallel`."""

FACTORS: dict[str, tuple[Any, ...]] = {
    "sequences": (1, 2, None),
    "shards": ("even", "empty", "masked"),
    "algorithm": tuple(LOSSES),
    "normalisation": NORMALISATIONS,
    "correction": tuple(CORRECTIONS),
    "renormalise": (False, True),
    "kl": ("off", "k2", "k3"),
    "kl_unbiased": (True, False),
    "entropy_coef": (0.0, 0.01),
    "given_old": (True, False),
    "chunk": (4096, 5),
    "tied": (True, False),
    "recompute": ("none", "selective", "full"),
    "use_distributed_optimizer": (True, False),
}
"""Fields of `Case` but for the layout, and their values."""

BOUNDS: dict[str, dict[str, Any]] = {
    "gspo": {"eps_low": 0.06, "eps_high": 0.04},
    "gspo_token": {"eps_low": 0.06, "eps_high": 0.04},
}
"""Wider than usual: the log-probs of these tests are some tenths apart."""

MANY = 3
"""Pairs of two factors that both have more values than this make up most cases; only a thorough cover has them."""


@dataclass(frozen=True)
class Loss:
    """What decides the value of the loss: cases with the same one have the same reference."""

    algorithm: str
    normalisation: str
    correction: str
    renormalise: bool
    kl: str
    kl_unbiased: bool
    entropy_coef: float
    given_old: bool
    """Old log-probs are given; else the ratio is 1."""
    tied: bool

    def recipe(self, max_length: float) -> Recipe:
        """In the words of the reference."""
        name = self.algorithm
        values: dict[str, Any] = {"loss": name, **LOSSES[name], **CORRECTIONS[self.correction], **BOUNDS.get(name, {})}
        values |= {"kl_coef": 0.0 if self.kl == "off" else 0.1, "kl": "k3" if self.kl == "off" else self.kl}
        for name in ("normalisation", "renormalise", "kl_unbiased", "entropy_coef"):
            values[name] = getattr(self, name)
        return Recipe(max_length=max_length, **values)


@dataclass(frozen=True)
class Case:
    """One update in one layout."""

    layout: str
    sequences: int | None
    """In each micro-batch; 1 is unpacked, None all that the rank has."""
    shards: str
    """even; empty: the last data-parallel rank has nothing; masked: it has all fully masked samples and no others."""
    algorithm: str
    normalisation: str
    correction: str
    renormalise: bool
    kl: str
    kl_unbiased: bool
    entropy_coef: float
    given_old: bool
    chunk: int
    """Tokens whose logits exist at a time."""
    tied: bool
    recompute: str
    use_distributed_optimizer: bool

    @property
    def loss(self) -> Loss:
        """Its part that a single rank can compute."""
        return Loss(**{name: getattr(self, name) for name in Loss.__dataclass_fields__})

    @property
    def parallel(self) -> dict[str, Any]:
        """Section `parallel`."""
        layout = next(layouts[self.layout] for layouts in LAYOUTS.values() if self.layout in layouts)
        return layout | {"recompute": self.recompute, "use_distributed_optimizer": self.use_distributed_optimizer}

    def __str__(self) -> str:
        short = {"sequences": "seqs", "kl_unbiased": "unbiased", "entropy_coef": "entropy", "renormalise": "recount"}
        short |= {"given_old": "old", "use_distributed_optimizer": "distopt"}
        words = [self.layout.replace(" ", "")]
        for name, value in list(asdict(self).items())[1:]:
            label = short.get(name, name)
            words += [label] * (value is True) if isinstance(value, bool) else [f"{label}={value}"]
        return " ".join(words)


def is_allowed(values: Mapping[str, Any]) -> bool:
    """Whether these settings, some or all, may be combined."""
    narrow = values.get("algorithm") in SEQUENCE_LEVEL
    if narrow and values.get("normalisation", "seq_mean_token_mean") != "seq_mean_token_mean":
        return False
    return values.get("given_old", True) or not values.get("renormalise", False)


def cover(layouts: Iterable[str], seed: int = 0, tries: int = 300, thorough: bool = False) -> list[Case]:
    """Few cases with every pair of values that may be combined (the layout is a factor, too); greedy, and the same for
    the same seed. Not `thorough`: without the pairs of two factors that both have `MANY` values."""
    factors = {"layout": tuple(layouts), **FACTORS}
    rng = random.Random(seed)
    missing = wanted_pairs(factors, thorough)
    cases = []
    while missing:
        anchor = dict(min(missing, key=repr))  # keeps every round useful
        candidates = [{name: rng.choice(values) for name, values in factors.items()} | anchor for _ in range(tries)]
        allowed = [candidate for candidate in candidates if is_allowed(candidate)]
        if allowed:
            best = max(allowed, key=lambda candidate: len(missing & pairs(candidate)))
            missing -= pairs(best)
            cases.append(Case(**best))
    return sorted(cases, key=str)


def pairs(values: Mapping[str, Any]) -> set[tuple[tuple[str, Any], ...]]:
    """Every two of its entries."""
    return set(itertools.combinations(values.items(), 2))


def wanted_pairs(factors: Mapping[str, tuple[Any, ...]], thorough: bool) -> set[tuple[tuple[str, Any], ...]]:
    """What `cover` has to cover."""
    found = set()
    for (a, first), (b, second) in itertools.combinations(factors.items(), 2):
        if thorough or min(len(first), len(second)) <= MANY:
            found |= {((a, x), (b, y)) for x in first for y in second if is_allowed({a: x, b: y})}
    return found


def deal(case: Case, lengths: list[int], masked: list[int], data_parallel_size: int, multiple: int) -> Plan:
    """The case's plan. With one data-parallel rank, `empty` adds empty micro-batches and `masked` one of only those.

    Args:
        lengths: tokens of every sequence.
        masked: indices of the fully masked ones.
        data_parallel_size, multiple: of `cfg.parallel`.
    """
    everything = list(range(len(lengths)))
    special = {"even": [], "empty": [], "masked": masked}[case.shards]
    normal = [i for i in everything if i not in special]
    ranks = data_parallel_size - (case.shards != "even" and data_parallel_size > 1)
    dealt = [_chunks(normal[rank::ranks], case.sequences) for rank in range(ranks)]
    extra = [_chunks(special, case.sequences) if special else [()]]
    if case.shards != "even":
        dealt = [dealt[0] + extra[0]] if data_parallel_size == 1 else dealt + extra
    count = -(-max(map(len, dealt)) // multiple) * multiple
    return Plan(tuple(tuple(part + [()] * (count - len(part))) for part in dealt))


def _chunks(indices: list[int], size: int | None) -> list[tuple[int, ...]]:
    size = size or len(indices)
    return [tuple(indices[i : i + size]) for i in range(0, len(indices), size)]
