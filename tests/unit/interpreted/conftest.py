"""Fixtures of the checks that run in Triton's interpreter: small blocks, and programs run in both orders."""

import pytest
from triton.runtime import interpreter

from megatron_rl.kernels.triton import launch, linear

COLUMNS, ROWS = 64, 16
"""Blocks so small that short rows take several, the last of them with a rest."""


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(launch, "MAX_COLUMNS", COLUMNS)
    monkeypatch.setattr(launch, "ROWS", ROWS)
    monkeypatch.setattr(linear, "TILE", (16, 32, 16))
    monkeypatch.setattr(linear, "PROGRAMS", 8)


@pytest.fixture(autouse=True)
def nothing_is_copied(monkeypatch):
    """The interpreter copies whole storages onto themselves after a launch, forbidden pages (`memory`) too."""
    monkeypatch.setattr(interpreter.GridExecutor, "_restore_args_dev", lambda *arguments: None)


@pytest.fixture(params=["first to last", "last to first"])
def order(request, monkeypatch):
    """No program may depend on what another one wrote, so their order must not matter."""
    if request.param == "last to first":
        builder = interpreter.interpreter_builder
        forward = builder.set_grid_idx
        monkeypatch.setattr(
            builder,
            "set_grid_idx",
            lambda *at: forward(*(n - 1 - i for n, i in zip(builder.grid_dim, at, strict=True))),
        )
