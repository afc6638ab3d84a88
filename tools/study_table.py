"""Table and plot of `study_moe_ratio.py`: means over seeds, printed as Markdown and drawn as SVG; measures nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_rl.files import write_atomic

HEADS = (
    "engine",
    "rate",
    "updates",
    "mismatch old / engine",
    "token std off",
    "variance left R2 / R3",
    "GSPO std off",
    "variance left R2 / R3",
    "clipped off / R2 / R3",
    "gap off / R2 / R3",
)
COLOURS = {"off": "#c44e52", "R2": "#dd8452", "R3": "#4c72b0"}
PANEL = (260, 200)
MARGIN = 60


@dataclass(frozen=True)
class Row:
    """One measurement of a whole batch.

    Attributes:
        token_std: standard deviation of the log-ratio current / old over tokens.
        sequence_std: of its mean over a response, GSPO's log-ratio.
        clipped: share of sequences outside GSPO's bounds, 1 - 3e-4 and 1 + 4e-4.
        gap: mean |log-prob of the trainer - log-prob of the engine| over tokens.
        mismatch: share of (token, layer) for which the live router would choose other experts than those replayed.
    """

    token_std: float
    sequence_std: float
    clipped: float
    gap: float
    mismatch: float


Table = dict[tuple[str, float, int, str], list[Row]]
"""By number format of the engine, learning rate, updates made and replay: a row for each seed."""


def mean(rows: Sequence[Row], name: str) -> float:
    """Of one column over seeds."""
    return float(np.mean([getattr(row, name) for row in rows]))


def print_table(table: Table) -> None:
    """Markdown; what R2 and R3 leave of a variance is the mean over seeds of each seed's quotient."""
    print("| " + " | ".join(HEADS) + " |")
    print("| --- |" + " ---: |" * (len(HEADS) - 1))
    for engine, rate, update in dict.fromkeys(key[:3] for key in table):
        off, r2, r3 = (table[engine, rate, update, mode] for mode in COLOURS)
        cells = [engine, f"{rate:.0e}", str(update), f"{mean(r2, 'mismatch'):.2%} / {mean(r3, 'mismatch'):.2%}"]
        for name in ("token_std", "sequence_std"):
            cells += [f"{mean(off, name):.1e}", f"{_left(off, r2, name)} / {_left(off, r3, name)}"]
        cells.append(" / ".join(f"{mean(rows, 'clipped'):.0%}" for rows in (off, r2, r3)))
        cells.append(" / ".join(f"{mean(rows, 'gap'):.1e}" for rows in (off, r2, r3)))
        print("| " + " | ".join(cells) + " |")


def print_spread(table: Table) -> None:
    """A line for each engine and rate: the least and the most of all seeds after the last update."""
    last = max(update for _, _, update, _ in table)
    for engine, rate in dict.fromkeys(key[:2] for key in table):
        off, r3 = (table[engine, rate, last, mode] for mode in ("off", "R3"))
        left = [f"{what} {_ends(_quotients(off, r3, name))}" for what, name in _RATIOS.items()]
        clipped = _ends([row.clipped for row in off])
        print(
            f"seeds, engine in {engine}, rate {rate:.0e}, {last} updates: variance left by R3, {', '.join(left)}; "
            f"clipped without replay {clipped}"
        )


_RATIOS = {"of tokens": "token_std", "of GSPO": "sequence_std"}


def _ends(values: Sequence[float]) -> str:
    return f"{min(values):.0%} to {max(values):.0%}" if values else "-"


def _left(off: Sequence[Row], replayed: Sequence[Row], name: str) -> str:
    quotients = _quotients(off, replayed, name)
    return f"{np.mean(quotients):.0%}" if quotients else "-"


def _quotients(off: Sequence[Row], replayed: Sequence[Row], name: str) -> list[float]:
    """Of the variance of each seed, with replay over without; empty when one of them has none."""
    pairs = [(getattr(a, name), getattr(b, name)) for a, b in zip(off, replayed, strict=True)]
    return [(b / a) ** 2 for a, b in pairs] if all(a for a, _ in pairs) else []


def draw(table: Table, file: Path) -> None:
    """A panel for each learning rate and kind of ratio, engine in bf16: deviation over updates, logarithmic."""
    names = {"token_std": "token log-ratio", "sequence_std": "GSPO log-ratio"}
    engine = list(dict.fromkeys(key[0] for key in table))[-1]
    rates = list(dict.fromkeys(key[1] for key in table))
    width, height = (PANEL[0] + MARGIN) * len(rates) + 20, (PANEL[1] + MARGIN) * len(names) + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for row, (name, title) in enumerate(names.items()):
        for column, rate in enumerate(rates):
            lines = {
                mode: [
                    (key[2], mean(table[key], name)) for key in table if key[:2] == (engine, rate) and key[3] == mode
                ]
                for mode in COLOURS
            }
            place = f"translate({MARGIN + column * (PANEL[0] + MARGIN)},{30 + row * (PANEL[1] + MARGIN)})"
            parts += [f'<g transform="{place}">', *_panel(lines, f"std of the {title}, rate {rate:.0e}"), "</g>"]
    write_atomic(file, "\n".join([*parts, "</svg>", ""]))


def _panel(lines: dict[str, list[tuple[int, float]]], title: str) -> list[str]:
    lines = {mode: [point for point in points if point[0] and point[1] > 0] for mode, points in lines.items()}
    values = [value for points in lines.values() for _, value in points]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    updates = sorted({update for points in lines.values() for update, _ in points})
    width, height = PANEL

    def across(update: int) -> float:
        return width * update / updates[-1]

    def down(value: float) -> float:
        return height * (high - math.log10(value)) / max(high - low, 1)

    found = [
        f'<text x="0" y="-8">{title}</text>',
        f'<rect width="{width}" height="{height}" fill="none" stroke="#888"/>',
    ]
    for power in range(low, high + 1):
        y = down(10.0**power)
        found.append(f'<line x1="0" x2="{width}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        found.append(f'<text x="-6" y="{y + 4:.1f}" text-anchor="end">1e{power}</text>')
    for update in updates:
        found.append(f'<text x="{across(update):.1f}" y="{height + 16}" text-anchor="middle">{update}</text>')
    found.append(f'<text x="{width / 2}" y="{height + 32}" text-anchor="middle">updates</text>')
    for number, (mode, points) in enumerate(lines.items()):
        path = " ".join(f"{across(update):.1f},{down(value):.1f}" for update, value in points)
        found.append(f'<polyline points="{path}" fill="none" stroke="{COLOURS[mode]}" stroke-width="2"/>')
        found.append(f'<text x="{width - 40}" y="{height - 44 + 16 * number}" fill="{COLOURS[mode]}">{mode}</text>')
    return found
