"""Starting and ending the embedded engine: what a supervisor sees."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.servers import REPOSITORY, launch_embedded, wait_until_ready
from tests.contract.trainer import join, tensors_of


def test_term_answers_what_runs_gives_up_what_it_waits_for_and_ends_cleanly(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    server = wait_until_ready(launch_embedded(tmp_path, *models, 4, "--dtype", "bfloat16"))
    try:
        published = json.loads(server.endpoint_file.read_text())
        assert published["model"] == str(models[0])
        assert server.process is not None
        assert published["pid"] == server.process.pid
        running = server.generate_later([5, 6, 7], max_new_tokens=4000, ignore_eos=True)
        server.wait_for_load("the request to run", lambda load: load["num_used_tokens"] > 10)
        server.ok("/pause_generation", {"mode": "in_place"})
        trainer = join(server)
        server.ok("/begin_weight_update", {})
        update = trainer.announce(tensors_of(models[1]))
        with pytest.raises(TimeoutError):
            update.result(0.2)  # nothing is sent
    finally:
        code = server.stop()
    assert update.result(10).status == 503
    trainer.close()
    assert code == 0, server.log.read_text()
    answer = running.result(10)
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert len(answer["output_ids"]) > 5
    assert not server.endpoint_file.exists()


def test_model_that_cannot_be_served_is_one_message_and_status_1() -> None:
    argv = [sys.executable, "-m", "megatron_rl.engines.serve", "--model", "/nonexistent"]
    ended = subprocess.run(argv, capture_output=True, text=True, cwd=REPOSITORY, timeout=120)
    assert ended.returncode == 1
    assert ended.stderr.count("\n") == 1
    assert "model /nonexistent: no config.json there" in ended.stderr


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--model", "/nonexistent"], "error: serve: model /nonexistent: no config.json there"),
        (["--model", "{model}", "--host", "192.0.2.1"], "error: serve: cannot listen on 192.0.2.1:30000"),
        (
            ["--model", "{model}", "--engine", "sglang", "--python", "/nonexistent"],
            "engine.python=/nonexistent: no such",
        ),
        (
            ["--model", "{model}", "--api-key-file", "/nonexistent"],
            "error: serve: --api-key-file=/nonexistent: cannot be read",
        ),
        ([], "error: serve: give --model DIR, or --config of a run"),
    ],
)
def test_the_command_says_in_one_message_why_it_does_not_serve(
    models: tuple[Path, Path], words: list[str], expected: str
) -> None:
    words = [word.format(model=models[0]) for word in words]
    ended = subprocess.run(
        [sys.executable, "-m", "megatron_rl.cli", "serve", *words],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        timeout=120,
    )
    assert ended.returncode == 2
    assert expected in ended.stderr
    assert "Traceback" not in ended.stderr
