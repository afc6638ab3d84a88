"""A line of a prompt file: what it may hold, and what is said of one that may not."""

import orjson
import pytest

from megatron_rl.data.records import DataError, PromptRecord, parse_line


def parse(value, where="prompts.jsonl:17"):
    line = value if isinstance(value, bytes) else orjson.dumps(value)
    return parse_line(line, where, default_id="prompts:17", default_source="prompts")


def test_a_prompt_becomes_one_user_message_and_gets_defaults():
    record = parse({"prompt": "3142", "answer": "1234"})
    assert record == PromptRecord("prompts:17", ({"role": "user", "content": "3142"},), "1234", "prompts", {}, None)


def test_all_keys_are_read():
    messages = [{"role": "system", "content": ""}, {"role": "user", "content": "go"}]
    record = parse(
        {"id": "a", "messages": messages, "answer": "", "source": "s", "extra": {"numbers": [1]}, "target": "t"}
    )
    assert record == PromptRecord("a", tuple(messages), "", "s", {"numbers": [1]}, "t")


def test_null_counts_as_absent():
    record = parse({"id": None, "prompt": "x", "answer": None, "extra": None})
    assert (record.id, record.answer, record.extra) == ("prompts:17", None, {})


@pytest.mark.parametrize(
    "value",
    [
        {"prompt": "3142", "answer": "1234", "target": "4321"},
        {"id": "a", "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}], "source": "z"},
        {"prompt": "é\n", "extra": {"numbers": [3, 5], "nested": {"a": None}}},
    ],
)
def test_a_written_record_is_read_back_equal(value):
    record = parse(value)
    assert parse(record.to_dict()) == record


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (b'{"prompt": "x"', "not valid JSON"),
        (b'{"prompt": "\xff"}', "not valid JSON"),
        (["prompt"], "the line is a list"),
        (b"null", "the line is null"),
        ({"prompt": "x", "anwser": "4"}, "unknown key 'anwser' (did you mean 'answer'?); allowed are answer, extra"),
        ({"answer": "4"}, 'neither "prompt" nor "messages"'),
        ({"prompt": "x", "messages": []}, 'both "prompt" and "messages"'),
        ({"prompt": ""}, "key \"prompt\" is a string (''); it must be a string that is not empty"),
        ({"prompt": 7}, 'key "prompt" is a number (7)'),
        ({"prompt": "x", "answer": 24}, 'key "answer" is a number (24); write it as in "answer": "24"'),
        ({"prompt": "x", "answer": True}, 'key "answer" is a boolean (True)'),
        ({"prompt": "x", "extra": [1]}, 'key "extra" is a list'),
        ({"prompt": "x", "id": ""}, 'key "id" is a string'),
        ({"prompt": "x", "target": ""}, 'key "target" is a string'),
        ({"messages": []}, 'key "messages" is a list'),
        ({"messages": "hello"}, 'key "messages" is a string'),
        ({"messages": [{"role": "user"}]}, "\"messages\"[0] has ['role']"),
        ({"messages": ["hi"]}, "\"messages\"[0] has a string ('hi')"),
        ({"messages": [{"role": "bot", "content": "x"}]}, "role 'bot' is unknown; allowed are system, developer, user"),
        ({"messages": [{"role": "user", "content": [1]}]}, '"content" is a list'),
        ({"messages": [{"role": "assistant", "content": "x"}]}, 'the last of "messages" is from the assistant'),
    ],
)
def test_a_bad_line_is_named_with_what_is_allowed(value, expected):
    with pytest.raises(DataError) as caught:
        parse(value)
    message = str(caught.value)
    assert message.startswith("prompts.jsonl:17: ")
    assert expected in message
    assert "\n" not in message
