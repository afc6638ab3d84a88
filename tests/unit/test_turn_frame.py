"""What lies between two turns of the model is what its chat template would have put there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.data import DataError, PromptRecord, PromptTokenizer, TurnFrame
from tests.tiny import CHAT_TEMPLATE, IM_END, tiny_tokenizer

# What published templates of the ChatML family do, written for these tests.
WITH_DEFAULT_SYSTEM = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system\nBe helpful.<|im_end|>\n"
    "{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WITH_TOOLS_AND_THINKING = (
    "{%- set ns = namespace(last=0) %}"
    "{%- for m in messages %}{% if m.role in ['user', 'tool'] %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'tool' %}"
    "{{- '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}"
    "{%- elif m.role == 'assistant' and loop.index0 > ns.last %}"
    "{{- '<|im_start|>assistant\n<think>\n\n</think>\n\n' + m.content + '<|im_end|>\n' }}"
    "{%- elif m.role == 'assistant' %}"
    "{{- '<|im_start|>assistant\n' + m.content.split('</think>')[-1].lstrip('\n') + '<|im_end|>\n' }}"
    "{%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"
)
INSTRUCTIONS = (
    "{% for m in messages %}{% if m.role == 'user' %}[I]{{ m.content }}[/I]"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
)
NEXT = "<|im_start|>assistant\n"
FOLLOWS = {
    "ChatML": (CHAT_TEMPLATE, "user", f"{IM_END}\n<|im_start|>user\n%s{IM_END}\n{NEXT}"),
    "default system": (WITH_DEFAULT_SYSTEM, "user", f"{IM_END}\n<|im_start|>user\n%s{IM_END}\n{NEXT}"),
    "tool": (
        WITH_TOOLS_AND_THINKING,
        "tool",
        f"{IM_END}\n<|im_start|>user\n<tool_response>\n%s\n</tool_response>{IM_END}\n{NEXT}",
    ),
    "instructions": (INSTRUCTIONS, "user", f"{IM_END}[I]%s[/I]"),
}


def tokenizer(folder: Path, template: str) -> PromptTokenizer:
    tiny_tokenizer(320).save_pretrained(folder)
    file = folder / "chat_template.jinja"
    file.write_text(template)
    (folder / "config.json").write_text(json.dumps({"vocab_size": 320}))
    return PromptTokenizer(folder)


@pytest.mark.parametrize("name", FOLLOWS)
def test_a_message_follows_the_sampled_tokens_as_the_template_renders_it(name: str, tmp_path: Path) -> None:
    template, role, follows = FOLLOWS[name]
    found = tokenizer(tmp_path, template)
    frame, (end,) = TurnFrame(found, role), found.eos_token_ids
    cut, ended = found.encode_text("3+4"), [*found.encode_text("3+4"), end]
    for text in ("7", "", "a\nb  "):
        assert found.encode_text(follows % text) == frame.tokens(text, cut)
        assert found.encode_text(follows % text) == [end, *frame.tokens(text, ended)]


@given(st.lists(st.text("ab 3+\n<", max_size=5), min_size=1, max_size=3))
@settings(deadline=None, max_examples=20)
def test_prompt_turns_and_messages_put_together_are_the_rendered_conversation(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str]
) -> None:
    found = tokenizer(tmp_path_factory.mktemp("t"), CHAT_TEMPLATE)
    frame, (end,) = TurnFrame(found, "user"), found.eos_token_ids
    messages = [{"role": "user", "content": "go"}]
    tokens = found.encode(PromptRecord("r", tuple(messages)))
    for text in texts:
        turn = [*found.encode_text(text), end]
        tokens += [*turn, *frame.tokens(text[::-1], turn)]
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": text[::-1]}]
    assert tokens == found.encode(PromptRecord("r", tuple(messages)))


@pytest.mark.parametrize(
    ("template", "role", "complaint"),
    [
        (
            "{% for m in messages %}{% if m.role != 'assistant' %}{{ m.content }}{% endif %}{% endfor %}",
            "user",
            "behind",
        ),
        ("{% for m in messages | reverse %}{{ m.content }}{% endfor %}", "user", "behind an answer, each once"),
        ("{{ messages[0].content }}{{ messages[1].content }}", "user", "MESSAGE"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}{{ messages[1].content }}", "user", "each once"),
        ("{% if messages[-1].role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}", "tool", "no tools"),
        (CHAT_TEMPLATE, "assistent", "allowed are system, .*tool"),
    ],
)
def test_a_template_that_puts_the_message_elsewhere_is_refused(
    template: str, role: str, complaint: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=complaint):
        TurnFrame(tokenizer(tmp_path, template), role)
