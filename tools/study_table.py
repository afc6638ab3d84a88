"""Table and plot of `study_moe_ratio.py`: means over seeds, printed as Markdown and drawn as SVG; measures nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from megatron_rl.files import write_atomic

COLOURS = {"off": "#c44e52", "R2": "#dd8452", "R3": "#4c72b0"}
PANEL = (300, 220)
MARGIN = 56


@dataclass(frozen=True)
class Row:
    """One measurement of a whole batch.

    Attributes:
        token_std: standard deviation of the log-ratio current / old over tokens.
        sequence_std: of its mean over a response, GSPO's log-ratio.
        clipped: share of sequences outside GSPO's bounds, 1 - 3e-4 and 1 + 4e-4.
        gap: mean |log-prob of the trainer - log-prob of the engine| over tokens.
        mismatch_old, mismatch_engine: share of (token, layer) for which the live router would choose other experts than
            before the first update, and than the engine.
    """

    token_std: float
    sequence_std: float
    clipped: float
    gap: float
    mismatch_old: float
    mismatch_engine: float


Table = dict[tuple[str, str, int], list[Row]]
"""By number format of the engine, replay and updates made: a row for each seed."""


def mean(rows: list[Row], name: str) -> float:
    """Of one column over seeds."""
    return float(np.mean([getattr(row, name) for row in rows]))


def print_table(table: Table) -> None:
    """Markdown, with the spread over seeds behind each standard deviation."""
    print("| engine | updates | replay | token log-ratio std | sequence log-ratio std | outside the clip | gap | "
          "mismatch old | mismatch engine |")  # fmt: skip
    print("| --- |" + " ---: |" * 8)
    updates = sorted({update for _, _, update in table if update in (0, 1, 2, 4, 8)})
    modes = list(dict.fromkeys(mode for _, mode, _ in table))
    for engine in dict.fromkeys(engine for engine, _, _ in table):
        for update in updates:
            for mode in modes:
                rows = table[engine, mode, update]
                cells = [_spread(rows, "token_std"), _spread(rows, "sequence_std"), f"{mean(rows, 'clipped'):.0%}"]
                cells.append(f"{mean(rows, 'gap'):.2e}")
                cells += [f"{mean(rows, name):.2%}" for name in ("mismatch_old", "mismatch_engine")]
                print(f"| {engine} | {update} | {mode} | " + " | ".join(cells) + " |")


def _spread(rows: list[Row], name: str) -> str:
    values = [getattr(row, name) for row in rows]
    return f"{np.mean(values):.2e} ± {np.std(values):.0e}"


def draw(table: Table, file: Path) -> None:
    """One panel for each engine and kind of ratio: standard deviation over updates, on a logarithmic axis."""
    engines = list(dict.fromkeys(engine for engine, _, _ in table))
    names = {"token_std": "token log-ratio", "sequence_std": "GSPO's sequence log-ratio"}
    assert set(names) <= {field.name for field in fields(Row)}
    width, height = (PANEL[0] + MARGIN) * len(engines) + 30, (PANEL[1] + MARGIN) * len(names) + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for row, (name, title) in enumerate(names.items()):
        for column, engine in enumerate(engines):
            place = f"translate({MARGIN + column * (PANEL[0] + MARGIN)},{30 + row * (PANEL[1] + MARGIN)})"
            parts += [f'<g transform="{place}">', *_panel(table, engine, name, title), "</g>"]
    write_atomic(file, "\n".join([*parts, "</svg>", ""]))


def _panel(table: Table, engine: str, name: str, title: str) -> list[str]:
    lines = {
        mode: [(update, mean(table[engine, mode, update], name)) for e, m, update in table if (e, m) == (engine, mode)]
        for mode in COLOURS
    }
    values = [value for points in lines.values() for update, value in points if update and value > 0]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    last = max(update for points in lines.values() for update, _ in points)
    width, height = PANEL

    def place(update: int, value: float) -> str:
        return f"{width * update / last:.1f},{height * (high - math.log10(value)) / max(high - low, 1):.1f}"

    found = [f'<text x="0" y="-8">std of the {title}, engine in {engine}</text>']
    found.append(f'<rect width="{width}" height="{height}" fill="none" stroke="#888"/>')
    for power in range(low, high + 1):
        y = height * (high - power) / max(high - low, 1)
        found.append(f'<line x1="0" x2="{width}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        found.append(f'<text x="-6" y="{y + 4:.1f}" text-anchor="end">1e{power}</text>')
    for update in range(1, last + 1):
        found.append(f'<text x="{width * update / last:.1f}" y="{height + 16}" text-anchor="middle">{update}</text>')
    found.append(f'<text x="{width / 2}" y="{height + 32}" text-anchor="middle">updates</text>')
    for number, (mode, points) in enumerate(lines.items()):
        path = " ".join(place(update, value) for update, value in points if update and value > 0)
        found.append(f'<polyline points="{path}" fill="none" stroke="{COLOURS[mode]}" stroke-width="2"/>')
        found.append(f'<text x="{width - 40}" y="{height - 44 + 16 * number}" fill="{COLOURS[mode]}">{mode}</text>')
    return found
