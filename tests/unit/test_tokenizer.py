"""Prompts become the same tokens as in transformers, and what a model directory lacks is said plainly."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from megatron_rl.data import DataError, PromptRecord, PromptTokenizer
from tests.tiny import CHAT_TEMPLATE, tiny_tokenizer

# Written for these tests: each uses what published templates use.
TEMPLATES = {
    "chatml": CHAT_TEMPLATE,
    "special tokens and an unused tool list": (
        "{{- bos_token if bos_token is defined else '' }}\n"
        "{%- if tools %}{{ tools | tojson }}{% endif %}\n"
        "{%- for m in messages %}\n    {{- m['role'] + ': ' + m.content | trim + eos_token }}\n{%- endfor %}\n"
        "{%- if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    ),
    "namespace, loop controls, filters and blocks": (
        "{% set ns = namespace(found=false, roles=[]) %}\n"
        "{% for m in messages %}\n"
        "    {% if m.role == 'system' %}{% set ns.found = true %}{% continue %}{% endif %}\n"
        "    {% set ns.roles = ns.roles + [m.role] %}\n"
        "{{ m | tojson }} {{ m.content.split('a')[0] | upper }}\n"
        "    {% if loop.index > 2 %}{% break %}{% endif %}\n"
        "{% endfor %}\n"
        "{% generation %}{{ ns.roles | tojson(indent=2) }}{% endgeneration %}\n"
        "{{ strftime_now('%Y') }}{{ enable_thinking if enable_thinking is defined }}{{ dict(a='<&>') | tojson }}"
    ),
}
CONVERSATIONS = [
    [("user", "3142")],
    [("system", "Be brief."), ("user", "Was ist 1+1?\n\n  «ä» <b>'\"</b> 日本 🙂 ")],
    [("user", "a"), ("assistant", "b<|im_end|>c"), ("tool", "{}"), ("user", "  ")],
]


def record(messages, **fields):
    return PromptRecord("id", tuple({"role": role, "content": content} for role, content in messages), **fields)


@pytest.fixture
def model(tmp_path):
    tiny_tokenizer(320).save_pretrained(tmp_path)
    return tmp_path


def set_config(model: Path, **changes):
    file = model / "tokenizer_config.json"
    config = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


@pytest.mark.parametrize("place", ["own file", "tokenizer_config.json", "named list", "data.chat_template"])
@pytest.mark.parametrize("template", TEMPLATES)
def test_ids_and_text_equal_those_of_transformers(model, tmp_path_factory, template, place):
    source, chosen = TEMPLATES[template], None
    (model / "chat_template.jinja").unlink()
    if place == "own file":
        (model / "chat_template.jinja").write_text(source)
    elif place == "data.chat_template":
        chosen = tmp_path_factory.mktemp("t") / "chosen.jinja"
        chosen.write_text(source)
    else:
        named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": source}]
        set_config(model, chat_template=source if place == "tokenizer_config.json" else named)
    theirs = AutoTokenizer.from_pretrained(model)
    ours = PromptTokenizer(model, chat_template=chosen)
    for messages in CONVERSATIONS:
        prompt = record(messages)
        options = {"add_generation_prompt": True}
        if chosen is not None:
            options["chat_template"] = source
        text = theirs.apply_chat_template(list(prompt.messages), tokenize=False, **options)
        ids = theirs.apply_chat_template(list(prompt.messages), **options)["input_ids"]
        assert ours.render(prompt) == text
        assert ours.encode(prompt) == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=False)


def test_the_system_prompt_goes_before_prompts_without_one(model):
    plain, ours = PromptTokenizer(model), PromptTokenizer(model, "Be brief.")
    assert ours.encode(record([("user", "x")])) == plain.encode(record([("system", "Be brief."), ("user", "x")]))
    own = record([("system", "Be long."), ("user", "x")])
    assert ours.encode(own) == plain.encode(own)


def test_limits_left_in_a_tokenizer_file_do_not_cut_prompts(model):
    file = model / "tokenizer.json"
    content = json.loads(file.read_text())
    content["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    file.write_text(json.dumps(content))
    assert len(PromptTokenizer(model).encode_text("0123456789")) == 10


def test_a_response_is_decoded_without_its_end_but_with_stray_special_tokens(model):
    tokenizer = PromptTokenizer(model)
    (end,) = tokenizer.eos_token_ids
    pad = 0
    digits = tokenizer.encode_text("12")
    assert tokenizer.decode([*digits, end]) == "12"
    assert tokenizer.decode(digits) == "12"
    assert tokenizer.decode([digits[0], pad, digits[1], end]) == "1<|endoftext|>2"
    assert tokenizer.decode([*digits, end, end]) == "12<|im_end|>"
    assert tokenizer.decode([]) == ""


def test_end_tokens_come_from_the_generation_config_the_assistant_s_own_first(model):
    own = PromptTokenizer(model).eos_token_ids[0]
    (model / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert PromptTokenizer(model).eos_token_ids == [7]
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, own]}))
    assert PromptTokenizer(model).eos_token_ids == [own, 0]


def test_supervised_targets_end_with_the_end_token(model):
    tokenizer = PromptTokenizer(model)
    prompt, response = tokenizer.encode_sft(record([("user", "21")], target="12"))
    assert prompt == tokenizer.encode(record([("user", "21")]))
    assert response == [*tokenizer.encode_text("12"), tokenizer.eos_token_ids[0]]
    with pytest.raises(DataError, match='has no "target"'):
        tokenizer.encode_sft(record([("user", "21")]))


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda m: (m / "tokenizer.json").unlink(), r"has no tokenizer.json; write one with .*AutoTokenizer"),
        (lambda m: (m / "tokenizer.json").write_text("{"), r"tokenizer.json: not a tokenizer"),
        (lambda m: (m / "tokenizer_config.json").write_text("{"), r"tokenizer_config.json: not valid JSON"),
        (lambda m: (m / "chat_template.jinja").unlink(), r"no chat template.*set data.chat_template"),
        (lambda m: (m / "chat_template.jinja").write_text("a\n{% if %}"), r"not a valid chat template \(line 2"),
        (lambda m: set_config(m, eos_token=None), r"no token ends a response; set eos_token_id"),
    ],
)
def test_a_directory_that_lacks_something_is_one_message(model, damage, expected):
    damage(model)
    with pytest.raises(DataError, match=expected) as caught:
        PromptTokenizer(model)
    assert str(model) in str(caught.value)


def test_a_chosen_template_that_is_not_there_is_named(model):
    with pytest.raises(DataError, match=r"data.chat_template='/none.jinja' cannot be read"):
        PromptTokenizer(model, chat_template="/none.jinja")


def test_messages_that_the_template_refuses_are_one_message(model):
    (model / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(DataError, match=r"refuses messages of roles \['user', 'user'\]: roles must alternate"):
        PromptTokenizer(model).encode(record([("user", "a"), ("user", "b")]))


@pytest.mark.parametrize(
    "attack",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{% set _ = messages.append({'role': 'user', 'content': 'x'}) %}",
        "{{ strftime_now.__globals__.clear() }}",
    ],
)
def test_a_template_cannot_reach_into_python_nor_change_records(model, attack):
    (model / "chat_template.jinja").write_text(attack)
    tokenizer = PromptTokenizer(model)
    prompt = record([("user", "a")])
    with pytest.raises(DataError, match="refuses messages"):
        tokenizer.render(prompt)
    assert len(prompt.messages) == 1


def test_a_moved_directory_reads_the_same(model, tmp_path_factory):
    copy = tmp_path_factory.mktemp("copy") / "model"
    shutil.copytree(model, copy)
    prompt = record([("user", "x")])
    assert PromptTokenizer(copy).encode(prompt) == PromptTokenizer(str(model)).encode(prompt)


def test_neither_data_nor_rewards_import_torch_or_transformers():
    code = (
        "import sys, importlib, pkgutil, megatron_rl.data, megatron_rl.rewards\n"
        "for room in (megatron_rl.data, megatron_rl.rewards):\n"
        "    for module in pkgutil.iter_modules(room.__path__, room.__name__ + '.'):\n"
        "        importlib.import_module(module.name)\n"
        "print(sorted({'torch', 'transformers', 'megatron'} & set(sys.modules)))"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr


def test_a_token_outside_the_vocabulary_of_the_model_is_named(model):
    (model / "config.json").write_text(json.dumps({"vocab_size": 60}))
    with pytest.raises(DataError, match=r"token \d+ \('.'\) is outside the model's vocab_size=60"):
        PromptTokenizer(model).encode(record([("user", "A ~")]))


@pytest.mark.parametrize(("eos", "expected"), [(9999, "outside the model's vocab_size"), ("x", "is not a token id")])
def test_an_end_token_that_the_model_cannot_produce_is_refused(model, eos, expected):
    (model / "config.json").write_text(json.dumps({"vocab_size": 320}))
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    with pytest.raises(DataError, match=expected):
        PromptTokenizer(model)


def test_a_template_that_leaves_nothing_of_a_prompt_is_refused(model, tmp_path):
    template = tmp_path / "empty.jinja"
    template.write_text("")
    with pytest.raises(DataError, match="record 'id' becomes a prompt without tokens"):
        PromptTokenizer(model, chat_template=template).encode(record([("user", "1")]))
