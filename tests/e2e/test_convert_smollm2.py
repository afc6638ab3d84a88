"""The real SmolLM2-135M through the converter: log-probs as those of transformers on 64 sentences; the same bits."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.contract.servers import NO_SGLANG, SGLANG, launch_sglang, wait_until_ready

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


@pytest.fixture(scope="module")
def converted(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """As a Megatron checkpoint, and back from there."""
    folder = tmp_path_factory.mktemp("converted")
    convert("hf-to-megatron", model, folder / "megatron", "--tp", 3, "--pp", 2, "--max-memory", "256MiB")
    convert("megatron-to-hf", folder / "megatron", folder / "back", "--max-memory", "256MiB")
    return folder / "megatron", folder / "back"


def test_the_real_model_converts_both_ways_and_computes_the_same(
    model: Path, converted: tuple[Path, Path], tmp_path: Path
) -> None:
    texts = sentences()
    assert len(texts) == 64
    (tmp_path / "texts").write_text("\n".join(texts))
    megatron, hf = converted
    said = convert("verify", megatron, "--hf", model, "--prompts", tmp_path / "texts")
    print(said)
    assert said.startswith("64 texts, ")
    assert said.rstrip().endswith("equal")
    assert float(re.findall(r"largest difference (\S+),", said)[0]) <= 1e-4
    source, back = load_file(model / "model.safetensors"), load_file(hf / "model.safetensors")
    assert source.keys() == back.keys()
    assert all((source[name] == back[name]).all() for name in source)
    assert "0 differ" in convert("diff", megatron, model)


def test_real_sglang_serves_what_came_back_and_agrees(
    model: Path, converted: tuple[Path, Path], tmp_path: Path
) -> None:
    if not SGLANG.exists():
        pytest.skip(NO_SGLANG)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    prompt = AutoTokenizer.from_pretrained(model)("The capital of France is").input_ids
    server = launch_sglang(tmp_path, converted[1], converted[1], 2, 256, dtype="float32")
    try:
        answer = wait_until_ready(server).generate(prompt, max_new_tokens=24, temperature=0.0)
    finally:
        server.stop()
    served, output, *_ = zip(*answer["meta_info"]["output_token_logprobs"], strict=True)
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.inference_mode():
        logits = reference(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(output)[:, None])[:, 0]
    gaps = (expected - torch.tensor(served)).abs()
    print(f"{len(output)} tokens served: largest difference {gaps.max():.1e}, mean {gaps.mean():.1e}")
    assert gaps.max() < 1e-3
    assert len(output) == 24
