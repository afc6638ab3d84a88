"""Files of routes: what was appended is read back by layer and token, from whichever part covers it, or refused."""

import io
import itertools
import os
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.routes import RoutePart, RoutesError, RouteStore, StoredRoutes
from megatron_rl.routes import store as store_module


def rows_of(tokens, layers, top_k, experts, salt=0):
    """int32 [tokens, layers, top_k]; every entry tells its token, layer and place apart, modulo the experts."""
    index = np.arange(tokens)[:, None, None] * 7 + np.arange(layers)[None, :, None] * 3 + np.arange(top_k) + salt
    return (index % experts).astype(np.int32)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_layers_and_tokens_of_any_parts_are_those_that_were_appended(tmp_path_factory, data):
    layers, top_k = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 4))
    experts = data.draw(st.sampled_from([4, 256, 257, 1000]))
    folder = tmp_path_factory.mktemp("routes")
    writers = [RouteStore(folder, layers, top_k, experts) for _ in range(2)]
    sequences, parts = [], []
    for salt in range(data.draw(st.integers(1, 3))):
        lengths = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=5))
        rows = rows_of(sum(lengths), layers, top_k, experts, salt)
        bounds = np.cumsum([0, *lengths])
        parts.append(
            [
                data.draw(st.sampled_from(writers)).append(rows[a:b], int(a), data.draw(st.sampled_from("pq")))
                for a, b in itertools.pairwise(bounds)
            ]
        )
        sequences.append(rows)
    stored = StoredRoutes(RouteStore(folder, layers, top_k, experts), parts)
    for index, rows in enumerate(sequences):
        begin, end = sorted((data.draw(st.integers(0, len(rows) + 3)), data.draw(st.integers(0, len(rows) + 3))))
        chosen = data.draw(st.lists(st.integers(0, layers - 1), unique=True))
        found = stored.rows(index, chosen, begin, end)
        expected = np.full((end - begin, len(chosen), top_k), -1)
        known = rows[begin:end][:, chosen]
        expected[: len(known)] = known
        assert found.dtype == np.int16
        np.testing.assert_array_equal(found, expected.swapaxes(0, 1))


def test_a_token_that_no_part_covers_is_marked(tmp_path):
    store = RouteStore(tmp_path, 2, 2, 8)
    parts = [store.append(rows_of(2, 2, 2, 8), 1), store.append(rows_of(1, 2, 2, 8), 5)]
    assert (store.read(parts, [0, 1], 0, 7)[:, :, 0] == -1).tolist() == [
        [True, False, False, True, True, False, True]
    ] * 2


def test_a_row_takes_one_byte_up_to_256_experts_and_two_above(tmp_path):
    assert RouteStore(tmp_path, 94, 8, 128).bytes_per_token == 752
    assert RouteStore(tmp_path, 58, 8, 256).bytes_per_token == 464
    assert RouteStore(tmp_path, 58, 8, 257).bytes_per_token == 928


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (np.zeros((3, 2, 4), np.int32), r"\(3, 2, 4\); \[rows, 2, 2\]"),
        (np.zeros((3, 3, 2), np.int32), r"\(3, 3, 2\)"),
    ],
)
def test_rows_of_another_shape_are_not_written(tmp_path, rows, message):
    store = RouteStore(tmp_path, 2, 2, 8)
    with pytest.raises(ValueError, match=message):
        store.append(rows, 0)
    assert not list(tmp_path.iterdir())


def test_selected_sequences_keep_their_routes(tmp_path):
    store = RouteStore(tmp_path, 1, 1, 9)
    routes = StoredRoutes(store, [[store.append(np.full((1, 1, 1), i), 0)] for i in range(3)])
    assert [int(routes.select([2, 0]).rows(i, [0], 0, 1)[0, 0, 0]) for i in range(2)] == [2, 0]


def test_files_that_are_gone_short_or_of_another_model_are_refused_with_their_names(tmp_path):
    store = RouteStore(tmp_path, 2, 2, 8)
    part = store.append(rows_of(4, 2, 2, 8), 0)
    with pytest.raises(RoutesError, match="another model; this one has 3x2x8 "):
        RouteStore(tmp_path, 3, 2, 8).read([part], [0], 0, 4)
    file = tmp_path / part.file
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(RoutesError, match=r"2x2x8\.u1: ends before the 4 rows at byte 0"):
        store.read([part], [0, 1], 0, 4)
    assert store.read([part], [0], 0, 4).shape == (1, 4, 2)  # what is there can be read
    file.unlink()
    with pytest.raises(RoutesError, match="No such file"):
        store.read([part], [0], 0, 4)


@pytest.mark.parametrize("experts", [8, 300])
@pytest.mark.parametrize("change", ["to other experts", "exchanged", "to none"])
def test_rows_that_were_changed_are_refused_with_their_place_by_all_who_read_near_them(tmp_path, experts, change):
    store, tokens = RouteStore(tmp_path, 2, 2, experts), store_module.SUMMED + 5
    store.append(rows_of(3, 2, 2, experts), 0)
    part = store.append(rows_of(tokens, 2, 2, experts), 0)
    path = tmp_path / part.file
    content = np.fromfile(path, np.uint8)
    values = content[-tokens * store.bytes_per_token :].view(store.dtype).reshape(2, tokens, 2)
    expected = values.copy()
    row = values[1, 1].astype(int)
    changed = {"to other experts": (row + 1) % experts, "exchanged": row[::-1], "to none": row * 0 - 1}[change]
    values[1, 1] = changed.astype(store.dtype)
    content.tofile(path)
    message = rf"{part.file}: the {tokens} rows at byte {part.offset} are not .* delete the file and resume the run"
    for layers, begin, end in (([0, 1], 0, tokens), ([1], 1, 2), ([1], 2, 4)):
        with pytest.raises(RoutesError, match=message):
            store.read([part], layers, begin, end)
    np.testing.assert_array_equal(store.read([part], [0], 0, tokens), expected[:1])
    np.testing.assert_array_equal(store.read([part], [1], tokens - 4, tokens), expected[1:, -4:])


@pytest.mark.parametrize("layers", [[0, 1, 2], [0, 2], [1]])
@pytest.mark.parametrize("tokens", [(500, 524), (0, 2), (1024, 1100), (3, 1097)])
def test_any_range_of_a_long_answer_is_found(tmp_path, layers, tokens):
    store, rows = RouteStore(tmp_path, 3, 2, 300), rows_of(1100, 3, 2, 300)
    part = store.append(rows, 0)
    assert (tmp_path / part.file).stat().st_size == store.size(part)
    found = store.read([part], layers, *tokens)
    np.testing.assert_array_equal(found, rows[slice(*tokens), layers].swapaxes(0, 1))


def test_a_pipe_in_the_place_of_a_file_is_refused_at_once(tmp_path):
    store = RouteStore(tmp_path, 1, 1, 8)
    part = store.append(rows_of(4, 1, 1, 8), 0)
    (tmp_path / part.file).unlink()
    os.mkfifo(tmp_path / part.file)
    with pytest.raises(RoutesError, match=rf"not a regular file; .*{part.file}"):
        store.read([part], [0], 0, 4)
    with pytest.raises(OSError, match="not a regular file"):
        store.sync([part.file])


class Hesitant(io.FileIO):
    """A file that lets others go first between finding its end and writing there."""

    def seek(self, *place):
        offset = super().seek(*place)
        time.sleep(0.001)
        return offset


def test_threads_of_one_writer_take_turns(tmp_path, monkeypatch):
    monkeypatch.setattr(store_module, "open", lambda path, mode, buffering=0: Hesitant(path, mode), raising=False)
    store = RouteStore(tmp_path, 3, 1, 200)
    with ThreadPoolExecutor(8) as pool:
        parts = list(pool.map(lambda i: store.append(np.full((1 + i % 3, 3, 1), i), 0, "pack"), range(40)))
    assert len({part.file for part in parts}) == 1
    for i, part in enumerate(parts):
        assert (store.read([part], range(3), 0, part.rows) == i).all()


WRITER = """
import sys
import numpy as np
from megatron_rl.routes import RouteStore
store = RouteStore(sys.argv[1], 8, 1, 200)
for number in range(10**9):
    part = store.append(np.full((500, 8, 1), number % 200), 0, "pack")
    sys.stdout.write(" ".join(map(str, (*part, number % 200))) + "\\n")
    sys.stdout.flush()
"""


def test_every_reference_of_a_killed_writer_is_whole_and_no_other_goes_on_with_its_file(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(WRITER), str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(20)]
    process.send_signal(signal.SIGKILL)
    lines += process.stdout.read().splitlines(keepends=True)
    process.wait()
    store = RouteStore(tmp_path, 8, 1, 200)
    told = [line.split() for line in lines if line.endswith("\n")]
    (name,) = {words[0] for words in told}
    with open(tmp_path / name, "ab") as file:  # an answer of which half was written
        file.write(b"\xff" * 100)
    own = store.append(np.full((500, 8, 1), 7), 0, "pack")
    assert own.file != name
    assert own.file.startswith("pack.")
    for words in told:
        part = RoutePart(words[0], *map(int, words[1:4]))
        assert (store.read([part], range(8), 0, 500) == int(words[4])).all()
    assert (store.read([own], range(8), 0, 500) == 7).all()


def test_sync_needs_the_files(tmp_path):
    store = RouteStore(tmp_path, 1, 1, 2)
    store.sync([])
    store.sync([store.append(np.zeros((1, 1, 1)), 0).file])
    with pytest.raises(FileNotFoundError):
        store.sync([f"gone.{os.getpid()}"])
