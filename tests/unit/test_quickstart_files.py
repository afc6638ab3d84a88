"""What the quickstart's directory holds: learnable prompts kept apart, and a model that other libraries can load."""

import hashlib
import itertools
import json
import subprocess
import sys
from collections import Counter
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_rl.config import read_hf_config
from megatron_rl.config.shards import num_parameters
from megatron_rl.data import DataError, PromptDataset, PromptTokenizer
from megatron_rl.data.generators import countdown, sort_digits
from megatron_rl.data.quickstart import Quickstart, write_quickstart
from megatron_rl.rewards.countdown import countdown as verify_countdown
from megatron_rl.rewards.countdown import countdown_format
from megatron_rl.rewards.exact import sorting, sorting_format

TOOL = Path(__file__).resolve().parents[2] / "tools" / "make_quickstart.py"


def hashes(directory):
    return {
        str(file.relative_to(directory)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(directory.rglob("*"))
        if file.is_file()
    }


def texts(records):
    return {record.messages[0]["content"] for record in records}


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    out = tmp_path_factory.mktemp("quickstart") / "inputs"
    write_quickstart(out, Quickstart(seed=5, prompts=300, eval_prompts=64, sft_prompts=100))
    return out


def test_the_files_are_what_the_loaders_read(quickstart):
    train, evaluation, sft = (
        PromptDataset.load(quickstart / f"{name}.jsonl", require=require)
        for name, require in (("train", ("answer",)), ("eval", ("answer",)), ("sft", ("answer", "target")))
    )
    assert (len(train), len(evaluation), len(sft)) == (300, 64, 100)
    assert sorting(train[0].answer, train[0]) == 1.0
    assert all(sorting_format(record.target, record) == 1.0 for record in sft)
    assert json.loads((quickstart / "quickstart.json").read_text())["seed"] == 5


def test_the_same_arguments_give_the_same_bytes_another_seed_others(quickstart, tmp_path):
    what = {"prompts": 300, "eval_prompts": 64, "sft_prompts": 100}
    write_quickstart(tmp_path / "same", Quickstart(seed=5, **what))
    write_quickstart(tmp_path / "other", Quickstart(seed=6, **what))
    first, same, other = hashes(quickstart), hashes(tmp_path / "same"), hashes(tmp_path / "other")
    assert first == same
    assert {name for name in first if first[name] != other[name]} == {
        "model/model.safetensors",
        "train.jsonl",
        "eval.jsonl",
        "sft.jsonl",
        "quickstart.json",
    }


def test_transformers_loads_the_model_and_agrees_on_the_tokens(quickstart):
    path = quickstart / "model"
    model, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert sum(parameter.numel() for parameter in model.parameters()) < 1_000_000
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.generation_config.eos_token_id == 2
    theirs, ours = AutoTokenizer.from_pretrained(path), PromptTokenizer(path)
    assert (theirs.pad_token_id, theirs.bos_token_id, theirs.eos_token_id) == (0, 1, 2)
    assert ours.eos_token_ids == [2]
    for record in PromptDataset.load(quickstart / "sft.jsonl"):
        prompt, response = ours.encode_sft(record)
        options = {"add_generation_prompt": True}
        assert theirs.apply_chat_template(list(record.messages), **options)["input_ids"] == prompt
        assert (len(prompt), len(response)) == (6, 5)
        assert ours.decode(response) == record.target
        assert max(prompt + response) < model.config.vocab_size
    tags = "<think>a b</think><answer>1+2</answer>"
    assert theirs.encode(tags, add_special_tokens=False) == ours.encode_text(tags)
    assert len(ours.encode_text(tags)) == 10
    assert ours.decode(ours.encode_text(tags)) == tags


def test_the_model_splits_over_two_ranks_and_starts_out_undecided(quickstart):
    hf = read_hf_config(quickstart / "model")
    assert hf.vocab_size == 64
    assert hf.tie_word_embeddings
    assert all(n % 2 == 0 for n in (hf.vocab_size, hf.num_attention_heads, hf.num_query_groups, hf.ffn_hidden_size))
    model = AutoModelForCausalLM.from_pretrained(quickstart / "model")
    with torch.no_grad():
        logits = model(torch.tensor([PromptTokenizer(quickstart / "model").encode_text("3142=")])).logits
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    assert entropy.min() > 3.5  # of log(64) = 4.16


def test_a_model_with_experts_is_a_qwen3_moe_on_the_same_prompts(quickstart, tmp_path):
    what = {"seed": 5, "prompts": 300, "eval_prompts": 64, "sft_prompts": 100}
    write_quickstart(tmp_path / "moe", Quickstart(**what, experts=8))
    assert hashes(tmp_path / "moe")["train.jsonl"] == hashes(quickstart)["train.jsonl"]
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "moe" / "model", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    hf = read_hf_config(tmp_path / "moe" / "model")
    assert (hf.moe.num_experts, hf.moe.top_k, hf.moe_layers) == (8, 2, (0, 1))
    assert num_parameters(hf) == sum(parameter.numel() for parameter in model.parameters()) < 1_000_000
    with pytest.raises(DataError, match="experts=1"):
        Quickstart(experts=1).make_prompts()


@pytest.mark.parametrize(
    "make",
    [
        lambda seed: sort_digits(seed, train=600, evaluation=200, sft=900, digits=3),
        lambda seed: countdown(seed, train=600, evaluation=200, sft=900),
        lambda seed: countdown(seed, 600, 200, 900, (3, 4), max_number=25, operators="+-*/", style="english"),
    ],
    ids=["sort", "countdown", "english countdown"],
)
def test_prompts_are_distinct_kept_apart_and_differ_by_seed(make):
    one, two = make(1), make(2)
    assert (len(texts(one.train)), len(texts(one.evaluation)), len(one.sft)) == (600, 200, 900)
    assert not texts(one.train) & texts(one.evaluation)
    assert texts(one.sft) == texts(one.train)
    assert texts(one.evaluation) != texts(two.evaluation)
    assert len({record.id for record in one.train + one.evaluation}) == 800
    assert len({record.id for record in one.sft}) == 900
    assert make(1) == one


def test_a_quarter_of_the_warm_up_targets_is_sorted_the_rest_in_random_order():
    records = sort_digits(3, train=4096, evaluation=512, sft=4000).sft
    right = [sorting(record.target, record) for record in records]
    chance = []
    for record in records:
        assert sorted(record.target) == sorted(record.messages[0]["content"]) == list(record.answer)
        orders = set(itertools.permutations(record.answer))
        chance.append(0.25 + 0.75 / len(orders))
    expected = sum(chance) / len(chance)
    assert abs(sum(right) / len(right) - expected) < 4 * (expected * (1 - expected) / len(right)) ** 0.5
    firsts = Counter(record.target[0] == record.answer[0] for record in records)
    assert firsts[False] > 1000


def reachable(numbers):
    """All values of all expressions of the numbers."""
    if len(numbers) == 1:
        return {Fraction(numbers[0])}
    values = set()
    for size in range(1, len(numbers)):
        for chosen in itertools.combinations(range(len(numbers)), size):
            left = [numbers[index] for index in chosen]
            right = [number for index, number in enumerate(numbers) if index not in chosen]
            for a, b in itertools.product(reachable(left), reachable(right)):
                values |= {a + b, a - b, a * b} | ({a / b} if b else set())
    return values


@pytest.mark.parametrize("operators", ["+-", "+-*/"])
def test_every_countdown_puzzle_has_a_solution_and_targets_keep_the_format(operators):
    prompts = countdown(1, train=60, evaluation=10, sft=60, numbers=(2, 4), max_number=12, operators=operators)
    for record in prompts.train + prompts.evaluation:
        assert 1 <= int(record.answer) <= 99
        assert int(record.answer) in reachable(record.extra["numbers"])
    assert all(countdown_format(record.target, record) == 1.0 for record in prompts.sft)
    solved = [verify_countdown(record.target, record) for record in prompts.sft]
    assert 0 < sum(solved) < 40


def test_more_prompts_than_there_are_is_one_message():
    with pytest.raises(DataError, match="90 training and 11 evaluation prompts of 2 digits: there are only 100"):
        sort_digits(0, train=90, evaluation=11, sft=0, digits=2)
    with pytest.raises(DataError, match=r"found only \d+ of 200 different countdown prompts"):
        countdown(0, train=190, evaluation=10, sft=0, numbers=(2, 2), max_number=3)
    with pytest.raises(DataError, match="at least 1 prompt"):
        Quickstart(prompts=0).make_prompts()


def run_tool(*arguments):
    return subprocess.run(
        [sys.executable, TOOL, *map(str, arguments)], capture_output=True, text=True, timeout=120, cwd="/"
    )


def test_the_tool_writes_replaces_its_own_and_refuses_other_directories(tmp_path):
    out = tmp_path / "runs" / "inputs"
    few = ("--prompts", 20, "--eval-prompts", 5, "--sft-prompts", 10)
    done = run_tool("--out", out, "--seed", 1, *few)
    assert done.returncode == 0, done.stderr
    assert str(out) in done.stdout
    first = hashes(out)
    assert run_tool("--out", out, "--task", "countdown", "--style", "english", "--no-model", *few).returncode == 0
    assert set(hashes(out)) == {"train.jsonl", "eval.jsonl", "sft.jsonl", "quickstart.json"}
    assert "Using the numbers" in (out / "train.jsonl").read_text()
    assert run_tool("--out", out, "--seed", 1, *few).returncode == 0
    assert hashes(out) == first

    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("x")
    refused = run_tool("--out", mine, *few)
    assert refused.returncode == 1
    assert f"{mine} exists and was not written by this tool" in refused.stderr
    assert [file.name for file in tmp_path.rglob("*") if file.is_file() and "inputs" not in file.parts] == [
        "thesis.txt"
    ]
    assert "only 100" in run_tool("--out", tmp_path / "x", "--digits", 2, "--prompts", 100).stderr


def test_fetching_smollm2_twice_does_nothing_and_other_directories_are_refused(tmp_path):
    fetch = TOOL.with_name("fetch_smollm2.py")

    def run(out):
        return subprocess.run([sys.executable, fetch, "--out", out], capture_output=True, text=True, timeout=60)

    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (model / name).write_text("{}")
    done = run(model)
    assert (done.returncode, done.stdout) == (0, f"{model}: already there\n")
    (model / "tokenizer.json").unlink()
    refused = run(model)
    assert refused.returncode == 1
    assert f"{model} exists and is not a model directory" in refused.stderr
