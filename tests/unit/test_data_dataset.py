"""Reading a whole prompt file: order, ids, fingerprint, and its faults by file and line."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from megatron_rl.data import DataError, PromptDataset, PromptRecord, check_targets, fit_to_length


@pytest.fixture
def write(tmp_path):
    def write_file(text, name="prompts.jsonl"):
        path = tmp_path / name
        path.write_text(text, "utf-8")
        return path

    return write_file


def texts(dataset):
    return [record.messages[0]["content"] for record in dataset]


def test_records_come_in_file_order_with_ids_from_their_lines(write):
    dataset = PromptDataset.load(write('{"prompt": "ä"}\n\n{"prompt": "b", "id": "mine"}\n  \n{"prompt": "c"}'))
    assert texts(dataset) == ["ä", "b", "c"]
    assert [record.id for record in dataset] == ["prompts:1", "mine", "prompts:5"]
    assert {record.source for record in dataset} == {"prompts"}
    assert dataset[-1] == dataset[2]
    assert dataset.where(2) == f"{dataset.path}:5"
    for outside in (3, -4):
        with pytest.raises(IndexError, match="which has 3"):
            dataset[outside]


def test_windows_line_ends_are_read(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"prompt": "a"}\r\n\r\n{"prompt": "b"}\r\n')
    assert texts(PromptDataset.load(path)) == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "holds no record"),
        ("\n \n", "holds no record"),
        ('{"prompt": "a"}\n\n{"prompt": 1}\n', 'prompts.jsonl:3: key "prompt" is a number (1)'),
        (
            '{"prompt": "a", "id": "x"}\n{"prompt": "b", "id": "x"}\n',
            "prompts.jsonl:2: id 'x' stands in line 1",
        ),
        ('{"prompt": "a"}\n{"prompt": "b", "id": "prompts:1"}\n', "prompts.jsonl:2: id 'prompts:1' stands in line 1"),
    ],
)
def test_a_fault_is_named_by_file_and_line(write, text, expected):
    path = write(text)
    with pytest.raises(DataError) as caught:
        PromptDataset.load(path)
    assert expected in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_missing_file_and_a_directory_are_one_message(tmp_path):
    with pytest.raises(DataError, match=r"none\.jsonl: cannot be read \(No such file"):
        PromptDataset.load(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match=r"cannot be read \(Is a directory"):
        PromptDataset.load(tmp_path)


def test_required_keys_are_asked_of_every_record(write):
    path = write('{"prompt": "a", "target": "t", "answer": ""}\n{"prompt": "b", "target": "t"}\n')
    assert len(PromptDataset.load(path, require=("target",))) == 2
    with pytest.raises(DataError, match=r'prompts.jsonl:2: key "answer" is missing'):
        PromptDataset.load(path, require=("target", "answer"))


def test_max_prompts_takes_the_first_and_ignores_the_rest(write):
    path = write('{"prompt": "a"}\n{"prompt": "b"}\nnot json\n')
    dataset = PromptDataset.load(path, max_prompts=2)
    assert texts(dataset) == ["a", "b"]
    assert dataset.fingerprint != PromptDataset.load(path, max_prompts=1).fingerprint


def test_the_fingerprint_follows_the_content_not_the_name(write):
    one = PromptDataset.load(write('{"prompt": "a"}\n', "one.jsonl"))
    same = PromptDataset.load(write('{"prompt": "a"}\n', "two.jsonl"))
    other = PromptDataset.load(write('{"prompt": "A"}\n', "three.jsonl"))
    assert one.fingerprint == same.fingerprint != other.fingerprint


def test_a_file_replaced_during_the_run_does_not_change_what_is_read(write):
    path = write('{"prompt": "a"}\n{"prompt": "b"}\n')
    dataset = PromptDataset.load(path)
    os.replace(write("{}\n", "new.jsonl"), path)
    assert texts(dataset) == ["a", "b"]


def test_threads_read_the_right_records(write):
    count = 500
    dataset = PromptDataset.load(write("".join(f'{{"prompt": "{"x" * (n % 7)}{n}"}}\n' for n in range(count))))
    with ThreadPoolExecutor(8) as threads:
        read = list(threads.map(lambda n: dataset[n].messages[0]["content"], list(range(count)) * 4))
    assert read == ["x" * (n % 7) + str(n) for n in range(count)] * 4


class CharacterTokens:
    def encode(self, record: PromptRecord) -> list[int]:
        return [ord(character) for character in record.messages[0]["content"]]

    def encode_sft(self, record: PromptRecord) -> tuple[list[int], list[int]]:
        return self.encode(record), [*map(ord, record.target or ""), 0]


def test_supervised_examples_that_do_not_fit_are_refused_by_name(write):
    path = write('{"prompt": "ab", "target": "12"}\n{"prompt": "abc", "target": "123"}\n')
    dataset = PromptDataset.load(path)
    check_targets(dataset, CharacterTokens(), 7, "the context")
    expected = f"{path}:2: prompt and target have 7 tokens, but the context allows 6; 1 of 2"
    with pytest.raises(DataError, match=expected):
        check_targets(dataset, CharacterTokens(), 6, "the context")


def test_prompts_that_do_not_fit_are_refused_by_name_or_left_out(write):
    dataset = PromptDataset.load(
        write('{"prompt": "abc"}\n{"prompt": "abcdef"}\n{"prompt": "ab"}\n{"prompt": "abcd"}\n')
    )
    assert fit_to_length(dataset, CharacterTokens(), 6, drop=False) == (dataset, 0)
    with pytest.raises(DataError, match=r"prompts.jsonl:2: the prompt has 6 tokens.*max_prompt_tokens=3 and 2 of 4"):
        fit_to_length(dataset, CharacterTokens(), 3, drop=False)
    kept, dropped = fit_to_length(dataset, CharacterTokens(), 3, drop=True)
    assert (texts(kept), dropped) == (["abc", "ab"], 2)
    assert kept[1] == dataset[2]
    assert kept.fingerprint != dataset.fingerprint
    with pytest.raises(DataError, match="4 of 4 prompts are longer"):
        fit_to_length(dataset, CharacterTokens(), 1, drop=True)
