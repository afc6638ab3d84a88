"""The real SmolLM2-135M through the converter: log-probs as those of transformers on 64 sentences; the same bits."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from .runs import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("smollm2") / "model"
    tool = ROOT / "tools" / "fetch_smollm2.py"
    subprocess.run([sys.executable, str(tool), "--out", str(path)], check=True, timeout=400)
    return path


def sentences() -> list[str]:
    """64 of those that this repository's pages are made of."""
    text = " ".join(path.read_text("utf-8") for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))])
    prose = re.sub(r"(?s:```.*?```)|^[|#].*$|[*`\[\]]", " ", text, flags=re.M)
    found = [" ".join(sentence.split()) for sentence in re.split(r"(?<=[.!?])\s", prose)]
    return [sentence for sentence in found if 40 <= len(sentence) <= 300][:64]


def convert(*words: object) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "megatron_rl.cli", "convert", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def test_the_real_model_converts_both_ways_and_computes_the_same(model: Path, tmp_path: Path) -> None:
    texts = sentences()
    assert len(texts) == 64
    (tmp_path / "texts").write_text("\n".join(texts))
    convert("hf-to-megatron", model, tmp_path / "megatron", "--tp", 3, "--pp", 2, "--max-memory", "256MiB")
    said = convert("verify", tmp_path / "megatron", "--hf", model, "--prompts", tmp_path / "texts")
    print(said)
    assert said.startswith("64 texts, ")
    assert said.rstrip().endswith("equal")
    assert float(re.findall(r"largest difference (\S+),", said)[0]) <= 1e-4
    convert("megatron-to-hf", tmp_path / "megatron", tmp_path / "back", "--max-memory", "256MiB")
    source, back = load_file(model / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors")
    assert source.keys() == back.keys()
    assert all((source[name] == back[name]).all() for name in source)
    assert "0 differ" in convert("diff", tmp_path / "megatron", model)
