"""How text that answers the model becomes tokens between two of its turns; one prompt alone is `tokenizer.py`.

A chat template renders whole conversations. Rendered again with one more message, what the model has sampled could
become other tokens than it sampled; so only what FOLLOWS an answer is taken from the template, and put behind the
sampled tokens as they are:

    ... <|im_start|>assistant\\n | 3+4 <|im_end|> | \\n<|im_start|>user\\n7<|im_end|>\\n<|im_start|>assistant\\n | ...
              prompt           |    sampled     |                  from the template                       | sampled
"""

from __future__ import annotations

from collections.abc import Sequence

from .records import ROLES, DataError, PromptRecord
from .tokenizer import PromptTokenizer

ANSWER, MESSAGE = "ANSWER-4f1c", "MESSAGE-9b27"
"""Stand for an answer of the model and for what follows it; no template changes such words."""


class TurnFrame:
    """Puts text as a message of `role` behind a turn of the model.

    Templates may rewrite what lies before (Qwen3's takes the thinking out of earlier turns): here the model goes on
    seeing what it wrote.

    Raises:
        DataError: the model's chat template does not put such a message behind the answer, once and as it stands.
    """

    def __init__(self, tokenizer: PromptTokenizer, role: str) -> None:
        if role not in ROLES:
            raise DataError(f"role {role!r} is unknown; allowed are {', '.join(ROLES)}")
        self._tokenizer, self._role = tokenizer, role
        rendered = self._render(MESSAGE)
        before, found, after = rendered.partition(ANSWER)
        if not found or ANSWER in after or MESSAGE in before or after.count(MESSAGE) != 1:
            raise DataError(
                f"the chat template does not put a message of role {role!r} behind an answer, each once and as it "
                f"stands: a user's text, the answer {ANSWER} and the message {MESSAGE} become {rendered!r}; set "
                "data.chat_template to a template that does, or use another role for the environment"
            )

    def tokens(self, text: str, sampled: Sequence[int]) -> list[int]:
        """Token ids from the end of a turn to the beginning of the next one, with `text` between.

        `sampled` are the tokens of the turn: an end that the model has sampled itself is not put there twice; a turn
        that was cut gets one.
        """
        _, _, after = self._render(text).partition(ANSWER)
        ids = self._tokenizer.encode_text(after)
        ended = len(sampled) > 0 and ids and ids[0] == sampled[-1] and ids[0] in self._tokenizer.eos_token_ids
        return ids[1:] if ended else ids

    def _render(self, text: str) -> str:
        roles = ("user", "assistant", self._role)
        messages = ({"role": r, "content": c} for r, c in zip(roles, ("?", ANSWER, text), strict=True))
        return self._tokenizer.render(PromptRecord("turn", tuple(messages)))
