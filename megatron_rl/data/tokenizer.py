"""Prompt records to token ids and response ids to text, from the files of a Hugging Face directory.

Uses `tokenizers` directly: importing transformers pulls in torch (2 s and 300 MB), which the rollout controller does
not need. A test holds the ids equal to those of `AutoTokenizer.apply_chat_template`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
from tokenizers import Tokenizer

from .chat_template import ChatTemplate, read_chat_template
from .records import DataError, PromptRecord

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class PromptTokenizer:
    """Encodes prompts with the chat template of the model in `model_path`.

    `system_prompt` goes before every prompt without a system message of its own. `chat_template` is a Jinja file used
    instead of the model's own. `eos_token_ids` are the tokens that end a response, the one that supervised targets end
    with first.
    Raises `DataError` when the directory lacks a file or says nothing about how prompts are written.
    """

    def __init__(
        self,
        model_path: str | Path,
        system_prompt: str | None = None,
        *,
        chat_template: str | Path | None = None,
    ) -> None:
        self._path = path = Path(model_path)
        config = _read_json(path / "tokenizer_config.json") or {}
        self._tokenizer = _load_tokenizer(path)
        vocab_size = (_read_json(path / "config.json") or {}).get("vocab_size")
        self._model_vocab_size: int | None = vocab_size if isinstance(vocab_size, int) else None
        self._special_tokens = _special_tokens(path, config)
        self._system_prompt = system_prompt
        source, origin = _template_source(path, config, chat_template)
        self._template = ChatTemplate(source, origin, self._special_tokens)
        self.eos_token_ids: list[int] = self._find_eos_token_ids(path)

    def render(self, record: PromptRecord) -> str:
        """The prompt as text, chat template included."""
        messages = list(record.messages)
        if self._system_prompt is not None and messages[0]["role"] not in ("system", "developer"):
            messages.insert(0, {"role": "system", "content": self._system_prompt})
        return self._template.render(messages)

    def encode(self, record: PromptRecord) -> list[int]:
        """Token ids of the prompt, up to where the response begins. Raises `DataError` when there are none."""
        ids = self.encode_text(self.render(record))
        if not ids:
            raise DataError(f"record {record.id!r} becomes a prompt without tokens; correct it or the chat template")
        return ids

    def encode_text(self, text: str) -> list[int]:
        """Token ids of a text as it stands: nothing is put before or after it.

        Raises `DataError` for an id beyond the model's vocabulary: tokenizer and model do not belong together.
        """
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        if self._model_vocab_size is not None and max(ids, default=0) >= self._model_vocab_size:
            raise DataError(self._foreign(max(ids)))
        return ids

    def encode_sft(self, record: PromptRecord) -> tuple[list[int], list[int]]:
        """Prompt ids, and the ids of `record.target` with the end-of-sequence token.

        The target is encoded by itself, as a model generates it. Raises `DataError` for a record without target.
        """
        if record.target is None:
            raise DataError(f'record {record.id!r} has no "target"; supervised data needs one in every line')
        return self.encode(record), [*self.encode_text(record.target), self.eos_token_ids[0]]

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a response, without the token that ended it.

        Special tokens elsewhere are shown: a verifier must not take `12<pad>34` for `1234`.
        """
        ids = list(token_ids)
        if ids and ids[-1] in self.eos_token_ids:
            ids.pop()
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def _foreign(self, token_id: int) -> str:
        return (
            f"{self._path}: token {token_id} ({self._tokenizer.id_to_token(token_id)!r}) is outside the model's "
            f"vocab_size={self._model_vocab_size}; tokenizer and model do not belong together, copy both again"
        )

    def _find_eos_token_ids(self, path: Path) -> list[int]:
        own = self._tokenizer.token_to_id(self._special_tokens.get("eos_token", ""))
        ids: list[int] = []
        for name in ("generation_config.json", "config.json"):
            found = (_read_json(path / name) or {}).get("eos_token_id")
            ids = found if isinstance(found, list) else [] if found is None else [found]
            if ids:
                break
        if not ids and own is not None:
            ids = [own]
        for token_id in ids:
            if type(token_id) is not int or token_id < 0:
                raise DataError(f"{path}: eos_token_id={token_id!r} is not a token id; correct it in {name}")
            if self._model_vocab_size is not None and token_id >= self._model_vocab_size:
                raise DataError(self._foreign(token_id))
        if not ids:
            raise DataError(
                f"{path}: no token ends a response; set eos_token_id in generation_config.json, "
                "or eos_token in tokenizer_config.json"
            )
        # The tokenizer's own is the one that ends an assistant's turn; others are alternatives.
        return sorted(ids, key=lambda token_id: token_id != own)


def _load_tokenizer(path: Path) -> Tokenizer:
    file = path / "tokenizer.json"
    if not file.is_file():
        raise DataError(
            f"{path}: has no tokenizer.json; write one with "
            f"transformers.AutoTokenizer.from_pretrained({str(path)!r}).save_pretrained({str(path)!r})"
        )
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises Exception itself
        raise DataError(f"{file}: not a tokenizer ({error}); copy the file again from the model's source") from None
    # Some published files carry the limits of the script that made them.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _special_tokens(path: Path, config: dict[str, Any]) -> dict[str, str]:
    """Names of templates such as `bos_token` and their texts; older directories keep them in a file of their own."""
    values = {**(_read_json(path / "special_tokens_map.json") or {}), **config}
    texts = {}
    for name in _SPECIAL:
        value = values.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if value is not None:
            texts[name] = str(value)
    return texts


def _template_source(path: Path, config: dict[str, Any], chosen: str | Path | None) -> tuple[str, str]:
    if chosen is not None:
        try:
            return Path(chosen).read_text("utf-8"), str(chosen)
        except OSError as error:
            raise DataError(f"data.chat_template={str(chosen)!r} cannot be read ({error.strerror})") from None
    own = read_chat_template(path, config)
    if own is None:
        raise DataError(
            f"{path}: the tokenizer has no chat template (a base model?); write how a prompt looks into a Jinja file, "
            "for example {% for m in messages %}{{ m.content }}{% endfor %}, and set data.chat_template to its path"
        )
    return own


def _read_json(file: Path) -> dict[str, Any] | None:
    if not file.is_file():
        return None
    try:
        value = orjson.loads(file.read_bytes())
    except orjson.JSONDecodeError as error:
        raise DataError(f"{file}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise DataError(f"{file}: must hold a JSON object")
    return value
