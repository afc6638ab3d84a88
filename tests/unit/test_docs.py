"""The examples in docs/ run: what a reader copies must work."""

from __future__ import annotations

import math
import re
import shlex
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from megatron_rl.algorithms.losses import policy_loss
from megatron_rl.algorithms.losses.trial import try_loss
from megatron_rl.algorithms.spec import LossSpec
from megatron_rl.config import Config, load_config
from megatron_rl.data.quickstart import Quickstart, write_quickstart
from megatron_rl.data.records import parse_line
from megatron_rl.preflight import check_plan
from megatron_rl.rewards.registry import BUILT_IN, load_verifier
from megatron_rl.rollout.environment import load_environment

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def blocks(page: str, language: str) -> list[str]:
    """The fenced code blocks of one language on a page, without the indentation of a list they stand in."""
    text = (DOCS / page).read_text("utf-8")
    found = re.findall(rf"^( *)```{language}\n(.*?)^\1```", text, re.M | re.S)
    return [textwrap.dedent(code) for _, code in found]


def test_the_configuration_example_is_valid(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(blocks("configuration.md", "yaml")[0])
    assert load_config(tmp_path / "mine.yaml").reward.components[0].name == "math"


def test_the_asynchronous_example_is_valid(tmp_path: Path) -> None:
    """Added to the example of a whole run, whose section it continues."""
    (tmp_path / "mine.yaml").write_text(blocks("configuration.md", "yaml")[0])
    (tmp_path / "async.yaml").write_text("extends: mine.yaml\n" + blocks("rollouts.md", "yaml")[0])
    cfg = load_config(tmp_path / "async.yaml")
    assert cfg.rollout.mode == "async"
    assert cfg.algorithm.corrections == ["tis"]


def test_the_settings_of_weight_updates_are_shown_with_their_defaults(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(blocks("configuration.md", "yaml")[0])
    (tmp_path / "weights.yaml").write_text("extends: mine.yaml\n" + blocks("weights.md", "yaml")[0])
    assert load_config(tmp_path / "weights.yaml").engine == load_config(tmp_path / "mine.yaml").engine


def test_the_configurations_that_are_shown_can_be_shown() -> None:
    commands = re.findall(r"^megatron-rl config (configs/.*)$", (DOCS / "configuration.md").read_text("utf-8"), re.M)
    assert len(commands) >= 2
    for command in commands:
        file, *overrides = shlex.split(command, comments=True)
        load_config(ROOT / file, overrides)


def test_the_plan_of_a_large_model_needs_nothing_but_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    code = next(block for block in blocks("moe.md", "bash") if "slurm --dry-run" in block)
    monkeypatch.chdir(ROOT)
    for command in code.replace("\\\n", " ").splitlines():
        words = shlex.split(command)
        file = words.index("configs/qwen3_235b_a22b_gspo.yaml")
        cfg = load_config(ROOT / words[file], [word for word in words[file:] if "=" in word])
        assert check_plan(cfg)[0].num_layers == 94


def test_every_file_that_a_page_names_is_there() -> None:
    pages = [*DOCS.glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    yours = {"megatron_rl/algorithms/losses/mine.py", "megatron_rl/weights/families/NAME.py"}
    named = {
        path
        for page in pages
        for path in re.findall(
            r"[`(./ ]((?:megatron_rl|tests|tools|configs|launch)/[\w/]+\.(?:py|sh|yaml))\b", page.read_text("utf-8")
        )
    }
    assert len(named) > 15
    assert [path for path in sorted(named - yours) if not (ROOT / path).is_file()] == []


def test_the_keys_without_a_default_are_named() -> None:
    first = (DOCS / "configuration.md").read_text("utf-8").partition("```")[0]
    required = set(Config.model_json_schema()["required"])
    assert required == {key.split(".")[0] for key in re.findall(r"`([a-z_.]+)`", first.partition("Unknown")[0])}


def test_every_built_in_reward_is_described() -> None:
    assert re.findall(r"^\| `(\w+)` \|", (DOCS / "add_a_reward.md").read_text("utf-8"), re.M) == [
        "exact",
        "math",
        *sorted(BUILT_IN.keys() - {"exact", "math"}),
    ]


def test_the_lines_that_use_the_trained_model_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_quickstart(tmp_path / "inputs", Quickstart(prompts=4, eval_prompts=4, sft_prompts=4))
    code = next(block for block in blocks("quickstart.md", "python") if "apply_chat_template" in block)
    exec(code.replace("DIR/weights/v000060", str(tmp_path / "inputs" / "model")), {})  # our own page
    assert re.match(r"<bos>2913=.", capsys.readouterr().out, re.S)


def test_the_prompt_lines_are_valid() -> None:
    lines = blocks("configuration.md", "json")[0].splitlines()
    records = [parse_line(line.encode(), "docs", "docs:1", "docs") for line in lines]
    assert [record.answer for record in records] == ["391", "24"]


def test_the_reward_example_is_accepted_and_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = next(block for block in blocks("add_a_reward.md", "python") if "def brevity" in block)
    (tmp_path / "brevity.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        verify = load_verifier("brevity:brevity", {"limit": 4})
        assert [verify(text, None, limit=4) for text in ("abcd", "abcdef", "abcdefgh")] == [1.0, 0.5, 0.0]
    finally:
        sys.modules.pop("brevity", None)


def test_the_reward_section_is_valid(tmp_path: Path) -> None:
    base = blocks("configuration.md", "yaml")[0].partition("reward:")[0]
    (tmp_path / "mine.yaml").write_text(base + blocks("add_a_reward.md", "yaml")[0])
    assert load_config(tmp_path / "mine.yaml").reward.components[1].args == {"limit": 400}


def test_the_environment_example_is_one_and_its_sections_are_valid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = next(block for block in blocks("environments.md", "python") if "HigherOrLower" in block)
    (tmp_path / "guessing.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "base.yaml").write_text(blocks("configuration.md", "yaml")[0].partition("reward:")[0])
    (tmp_path / "mine.yaml").write_text("extends: base.yaml\n" + blocks("environments.md", "yaml")[0])
    rollout = load_config(tmp_path / "mine.yaml").rollout
    try:
        kind = load_environment(str(rollout.environment), rollout.environment_args)
        game = kind(**rollout.environment_args)
        assert game.reset(parse_line(b'{"prompt": "guess", "answer": "7"}', "docs", "docs:1", "docs")) is None
        assert [game.step(text) for text in ("hm", "5", "9", "7!")] == [
            ("That is no number.", False, None),
            ("higher", False, 0.0),
            ("lower", False, 0.0),
            ("", True, 1.5),
        ]
    finally:
        sys.modules.pop("guessing", None)


def test_the_loss_example_is_a_loss_and_its_section_selects_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tapered.py").write_text(blocks("add_a_loss.md", "python")[0])
    monkeypatch.syspath_prepend(str(tmp_path))
    base = blocks("configuration.md", "yaml")[0].partition("algorithm:")[0]
    (tmp_path / "mine.yaml").write_text(base + blocks("add_a_loss.md", "yaml")[0])
    spec = LossSpec.from_config(load_config(tmp_path / "mine.yaml").algorithm)
    try:
        try_loss(spec)
        log_probs = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
        loss, _ = policy_loss(
            log_probs,
            spec,
            old_log_probs=torch.tensor([-1.0, -2.5], dtype=torch.float64),
            advantages=torch.tensor([1.0, -1.0], dtype=torch.float64),
            weights=torch.tensor([0.5, 0.5], dtype=torch.float64),
        )
        loss.backward()
    finally:
        sys.modules.pop("tapered", None)
    faded = math.exp(0.5 - 1.0)  # log r is 0.5, width is 0.5
    assert loss.item() == pytest.approx(0.5 * (1.0 - 2.0 * faded))
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == pytest.approx([-0.5, 0.5 * faded])
