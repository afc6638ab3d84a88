"""The fused linear loss of every algorithm over real ranks, vocabulary and sequences split, is that of the formulas.

Four ranks: tensor parallel 2 x context parallel 2 (zig-zag), or tensor parallel 4; with sequence parallelism and
without. `pytest tests/parallel/test_loss_shards.py -s -k table` prints the largest error of each algorithm and layout.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import strategies as st

from megatron_rl.algorithms.token_statistics import merge_statistics
from tests.loss_batches import Batch, Split, batches, drawn, splits
from tests.loss_heads import Ranks, World, as_found, evaluate_heads, linear_reference
from tests.loss_recipes import EXTRAS, LOSSES, SEQUENCE_LEVEL, recipes
from tests.parallel.launch import run_ranks
from tests.reference_loss import Recipe
from tests.unit.test_loss_invariance import errors
from tests.worst import worst

pytestmark = pytest.mark.parallel

TOLERANCE = 1e-5
LAYOUTS = {"TP2 CP2": (2, False), "TP2 CP2 SP": (2, True), "TP4": (4, False), "TP4 SP": (4, True)}
"""Name -> tensor-parallel ranks of the four, sequence parallelism."""
RECIPES = recipes()


@dataclass(frozen=True)
class Case:
    """One batch of one recipe in one layout."""

    layout: str
    recipe: Recipe
    batch: Batch
    given_old: bool
    split: Split
    chunk: int


@st.composite
def cases(draw: st.DrawFn, recipe: Recipe, layout: str) -> Case:
    batch = draw(batches(recipe.loss in SEQUENCE_LEVEL, recipe.sequence_bounds))
    full = replace(recipe, **draw(EXTRAS))
    tensor, sequence_parallel = LAYOUTS[layout]
    split = replace(
        draw(splits(len(batch.lengths), even=True)), context=4 // tensor, multiple=tensor if sequence_parallel else 1
    )
    given_old = full.renormalise or draw(st.booleans())
    return Case(layout, full, batch, given_old, split, draw(st.sampled_from([1, 3, 8, 100])))


def all_cases() -> dict[str, Case]:
    """Each recipe in one of the layouts, by turns."""
    names = list(LAYOUTS)
    turns = [names[(i + i // len(names)) % len(names)] for i in range(len(RECIPES))]
    return {
        f"{name} in {turn}": drawn(cases(recipe, turn), lambda case: case.batch.mask.sum())
        for (name, recipe), turn in zip(RECIPES.items(), turns, strict=True)
    }


def run_cases(prepared: dict[str, tuple[Case, Any]]) -> dict[str, Any]:
    """On each rank: what it sees of every case."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, found = dist.get_rank(), {}
    groups = {(0, 1): None, (2, 3): None, (0, 2): None, (1, 3): None, (0, 1, 2, 3): None}
    groups = {members: dist.new_group(list(members)) for members in groups}
    for name, (case, log_probs) in prepared.items():
        tensor, sequence_parallel = LAYOUTS[case.layout]
        context_rank = rank // tensor
        shards = tuple(range(context_rank * tensor, (context_rank + 1) * tensor))
        peers = groups.get((rank % 2, rank % 2 + 2)) if tensor == 2 else None

        def total(values: Any, peers: Any = peers) -> Any:
            values = values.clone()
            dist.all_reduce(values, group=peers)
            return values

        ranks = Ranks(case.chunk, groups[shards], sequence_parallel, context_rank, total if tensor == 2 else None)
        found[name] = evaluate_heads(
            case.batch, case.recipe, World.of(case.batch), log_probs, case.given_old, case.split, ranks
        )
    dist.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, float]]:
    """Case -> errors."""
    drawn_cases = all_cases()
    expected = {n: linear_reference(c.batch, c.recipe, World.of(c.batch), c.given_old) for n, c in drawn_cases.items()}
    by_rank = run_ranks(4, run_cases, {n: (c, expected[n][1]) for n, c in drawn_cases.items()}, timeout=500)
    measured = {}
    for name, case in drawn_cases.items():
        tensor = LAYOUTS[case.layout][0]
        totals = [rank[name] for rank in by_rank]
        assert all(totals[r]["loss"] == totals[r - r % tensor]["loss"] for r in range(4))  # to the last bit
        firsts = totals[::tensor]
        merged = {key: sum(total[key] for total in firsts) for key in ("loss", "hidden", "weight")}
        sums = merge_statistics(total["sums"] for total in firsts)
        measured[name] = errors(as_found(case.batch, merged | {"sums": sums}), expected[name][0])
    return measured


def test_every_algorithm_is_the_formula_over_four_ranks(results: dict[str, dict[str, float]]) -> None:
    wrong = {name: found for name, found in results.items() if not worst(found.values()) <= TOLERANCE}
    assert wrong == {}
    assert sum(max(found.values()) > 0 for found in results.values()) > 0.9 * len(results)  # nearly all compute much


def table(results: dict[str, dict[str, float]]) -> str:
    """Largest error of loss, gradients and metrics of each algorithm in each layout."""
    lines = [f"{'':12}" + "".join(f"{name:>12}" for name in LAYOUTS)]
    for loss in LOSSES:
        cells = []
        for layout in LAYOUTS:
            found = [
                worst(e.values()) for n, e in results.items() if n.startswith(f"{loss},") and n.endswith(f" {layout}")
            ]
            cells.append(f"{worst(found):12.1e}" if found else f"{'-':>12}")
        lines.append(f"{loss:12}" + "".join(cells))
    return "\n".join(lines)


def test_table_of_errors(results: dict[str, dict[str, float]]) -> None:
    """With -s this shows the table; the numbers are asserted above."""
    print("\n" + table(results))
    assert len(table(results).splitlines()) == 1 + len(LOSSES)
