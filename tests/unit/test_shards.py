"""How layers are dealt over pipeline stages, as Megatron deals them."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_rl.config.parallel import ParallelConfig
from megatron_rl.config.shards import stage_layers


def parallel(stages: int, chunks: int | None = None, first: int | None = None, last: int | None = None) -> Any:
    return ParallelConfig(
        pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=chunks,
        num_layers_in_first_pipeline_stage=first,
        num_layers_in_last_pipeline_stage=last,
    )


@pytest.mark.parametrize(
    ("layers", "layout", "counts"),
    [
        (8, parallel(1), [8]),
        (8, parallel(4), [2, 2, 2, 2]),
        (94, parallel(8, first=11, last=11), [11, *[12] * 6, 11]),
        (61, parallel(16, first=3, last=2), [3, *[4] * 14, 2]),
        (7, parallel(4, first=1), [1, 2, 2, 2]),
        (7, parallel(2, last=3), [4, 3]),
        (7, parallel(2, first=2, last=5), [2, 5]),
    ],
)
def test_every_layer_is_on_one_stage_in_order(layers: int, layout: ParallelConfig, counts: list[int]) -> None:
    dealt = stage_layers(layers, layout)
    assert [len(chunk) for stage in dealt for chunk in stage] == counts
    assert [layer for stage in dealt for chunk in stage for layer in chunk] == list(range(layers))


def test_virtual_stages_go_round_the_stages() -> None:
    assert stage_layers(8, parallel(2, chunks=2)) == [
        [range(2), range(4, 6)],
        [range(2, 4), range(6, 8)],
    ]
    assert stage_layers(12, parallel(3, chunks=2, first=2, last=2)) == [
        [range(1), range(6, 7)],
        [range(1, 5), range(7, 11)],
        [range(5, 6), range(11, 12)],
    ]


@pytest.mark.parametrize(
    ("layers", "layout", "message"),
    [
        (94, parallel(8), r"pipeline_model_parallel_size=8 does not divide 94 layers; use one of \[1, 2, 47, 94\], or"),
        (94, parallel(8, first=11), "= 11, None leave 83 of 94 layers to 7 other pipeline stages"),
        (8, parallel(2, first=3, last=4), "= 3, 4 leave 1 of 8 layers to 0 other pipeline stages"),
        (8, parallel(4, first=4, last=4), "= 4, 4 leave 0 of 8 layers to 2 other pipeline stages"),
        (10, parallel(2, chunks=2), "virtual_pipeline_model_parallel_size=2 does not divide the 5 layers"),
    ],
)
def test_layers_that_cannot_be_dealt_are_refused_with_the_fix(
    layers: int, layout: ParallelConfig, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        stage_layers(layers, layout)
