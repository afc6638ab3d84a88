"""What the study of ratios prints of its measurements, on given ones."""

from __future__ import annotations

import pytest

from tools.study_table import Row, Table, print_spread, print_table


def row(std: float, clipped: float = 0.5) -> Row:
    return Row(token_std=std, sequence_std=2 * std, clipped=clipped, gap=0.01, mismatch=0.02)


def test_the_table_has_means_over_seeds_and_the_spread_their_ends(capsys: pytest.CaptureFixture[str]) -> None:
    table: Table = {
        ("float32", 1e-6, 0, mode): [row(0.0, clipped=0.0), row(0.0, clipped=0.0)] for mode in ("off", "R2", "R3")
    }
    table |= {("float32", 1e-6, 8, mode): [row(1.0, 0.4), row(2.0, 0.6)] for mode in ("off", "R2")}
    table["float32", 1e-6, 8, "R3"] = [row(0.5), row(0.2)]
    print_table(table)
    start, end = (line.split(" | ") for line in capsys.readouterr().out.splitlines()[2:])
    assert start[5] == "- / -"
    assert end[4:6] == ["1.5e+00", "100% / 13%"]
    print_spread(table)
    assert capsys.readouterr().out == (
        "seeds, engine in float32, rate 1e-06, 8 updates: variance left by R3, of tokens 1% to 25%, "
        "of GSPO 1% to 25%; clipped without replay 40% to 60%\n"
    )
