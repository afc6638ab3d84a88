"""Statistics of hidden @ weight.T without logits, against those of the logits."""

import pytest
import torch

from megatron_rl.kernels.triton import linear_statistics
from megatron_rl.kernels.vocab_rows import MOST_NEGATIVE, Rows

from .exact import exact, random_rows
from .memory import rows_before_a_wall, rows_on_pages


def random_operands(dtype=torch.float32, rows=26, hidden=40, width=208, valid=187, **options):
    found = random_rows(rows=rows, width=width, valid=valid, **options)
    generator = torch.Generator().manual_seed(4)
    h = torch.randn(rows, hidden, generator=generator).to(dtype)
    w = (0.5 * torch.randn(width, hidden, generator=generator)).to(dtype)
    index = torch.arange(rows) if found.index is None else found.index
    return h, w, Rows((h.double() @ w.double().T), found.target, index, found.inverse_temperature, valid)


def run(h, w, rows, with_entropy=True):
    return linear_statistics(h, w, rows.target, rows.index, rows.inverse_temperature, rows.valid, with_entropy)


def agree(found, rows):
    """Sums of products round; e^x turns their absolute into a relative error."""
    wanted = exact(rows).statistics
    torch.testing.assert_close(found.double(), wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("masked", "scaled"), [(False, False), (True, True)])
@pytest.mark.usefixtures("order")
def test_statistics_are_those_of_the_logits(dtype, masked, scaled):
    h, w, rows = random_operands(dtype, masked=masked, scaled=scaled)
    agree(run(h, w, rows), rows)


@pytest.mark.parametrize(
    ("width", "valid", "hidden"), [(16, 1, 16), (32, 32, 16), (64, 33, 24), (96, 96, 7), (512, 511, 16)]
)
def test_any_vocabulary_and_any_depth_is_covered(width, valid, hidden):
    h, w, rows = random_operands(width=width, valid=valid, hidden=hidden)
    agree(run(h, w, rows), rows)


def test_a_target_of_the_next_slice_is_not_taken_for_a_column_behind_the_last():
    h, w, rows = random_operands(width=80, valid=80)
    rows.target[:] = torch.arange(len(rows.target)) % 16 + 80
    assert torch.equal(run(h, w, rows)[2], torch.zeros(len(rows.target)))


def test_without_entropy_only_the_last_statistic_is_missing():
    h, w, rows = random_operands()
    found = run(h, w, rows, with_entropy=False)
    assert torch.equal(found[:3], run(h, w, rows)[:3])
    assert torch.equal(found[3], torch.zeros_like(found[3]))


def test_a_slice_of_nothing_but_padding_has_no_weight():
    h, w, rows = random_operands()
    found = run(h, w, Rows(rows.logits, torch.full_like(rows.target, -1), rows.index, rows.inverse_temperature, 0))
    assert torch.equal(found[1:], torch.zeros_like(found[1:]))
    assert torch.all(found[0] <= MOST_NEGATIVE * 0.1)


def test_padding_rows_of_the_weight_change_nothing():
    h, w, rows = random_operands()
    clean = run(h, w, rows)
    w[rows.valid :] = torch.nan
    assert torch.equal(run(h, w, rows), clean)


def test_masked_rows_are_never_read():
    h, w, rows = random_operands()
    masked = [row for row in range(26) if row not in rows.index]
    assert torch.equal(run(rows_on_pages(h, masked), w, rows), run(h, w, rows))


def test_nothing_behind_the_operands_is_read():
    h, w, rows = random_operands(hidden=42)
    assert torch.equal(run(rows_before_a_wall(h), rows_before_a_wall(w), rows), run(h, w, rows))


def test_nothing_between_the_rows_is_read():
    h, w, rows = random_operands(hidden=42)
    wide = [torch.cat([x, torch.full((len(x), 6), torch.nan)], 1)[:, :42] for x in (h, w)]
    assert torch.equal(run(*wide, rows), run(h, w, rows))


def test_no_live_row_is_no_work():
    h, w, rows = random_operands()
    none = torch.empty(0, dtype=torch.int64)
    assert linear_statistics(h, w, none, none, None, rows.valid, True).shape == (4, 0)
