"""A response in several turns: what was sampled stays, budgets hold, a suspended one goes on as if it had not been."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_rl.config.reward import RewardConfig
from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.data import PromptRecord, PromptTokenizer
from megatron_rl.rewards import RewardPool
from megatron_rl.rollout.protocol import SamplingSettings
from megatron_rl.rollout.sample import ENVIRONMENT_FAILED, Group, Sample, Span
from megatron_rl.rollout.scoring import judge
from megatron_rl.rollout.turns import open_turns, turn_metrics
from megatron_rl.rollout.wire import pack_groups, unpack_groups
from tests.tiny import tiny_tokenizer

HOOKS = "tests.unit.environment_hooks"
RECORD = PromptRecord("r1", ({"role": "user", "content": "go"},), answer="3")
AGAIN = "<|im_end|>\n<|im_start|>user\n%s<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PromptTokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer(320).save_pretrained(folder)
    return PromptTokenizer(folder)


class Script:
    """Engines that say one prepared text after the other, and end each with the end-of-turn token.

    `pieces`: tokens after which a request comes back unfinished, as one of a suspended group does; then all of it.
    """

    def __init__(self, tokenizer: PromptTokenizer, texts: Sequence[str], pieces: Sequence[int] = ()) -> None:
        self._turns = [[*tokenizer.encode_text(text), tokenizer.eos_token_ids[0]] for text in texts]
        self._pieces, self.calls = list(pieces), 0

    async def generate(self, samples: Sequence[Sample], settings: SamplingSettings) -> None:
        for sample in samples:
            begun = sample.response_length - (sample.observations[-1][1] if sample.observations else 0)
            rest = self._turns[len(sample.observations)][begun:]
            room = settings.max_new_tokens - sample.response_length
            assert room > 0
            piece = self._pieces.pop(0) if self._pieces else len(rest)
            tokens = rest[: min(room, piece)]
            if tokens:
                sample.append(tokens, [-1.0] * len(tokens), [Span(self.calls, 0, len(tokens))])
            self.calls += 1
            if len(tokens) == len(rest):
                sample.finish("stop")
            elif len(tokens) == room:
                sample.finish("length")


def group_of(tokenizer: PromptTokenizer, size: int = 1, record: PromptRecord = RECORD) -> Group:
    prompt = np.array(tokenizer.encode(record))
    return Group.start(0, record.id, prompt, size, run_seed=0, version=0, temperature=1.0)


def settings(tokenizer: PromptTokenizer, max_new_tokens: int = 400) -> SamplingSettings:
    return SamplingSettings(1.0, max_new_tokens, tuple(tokenizer.eos_token_ids))


def rollout(name: str = "Counts", **keys: Any) -> RolloutConfig:
    args = {key: keys.pop(key) for key in ("last", "opening", "reward") if key in keys}
    return RolloutConfig(
        environment=f"{HOOKS}:{name}", environment_args=args, environment_workers=1, max_prompt_tokens=200, **keys
    )


async def played(
    tokenizer: PromptTokenizer, cfg: RolloutConfig, texts: Sequence[str], max_new_tokens: int = 400, size: int = 1
) -> Group:
    script = Script(tokenizer, texts)
    async with open_turns(script, tokenizer, cfg) as turns:
        group = group_of(tokenizer, size, await turns.opened(RECORD))
        await turns.play([group], [RECORD], settings(tokenizer, max_new_tokens), lambda _: False)
    return group


def test_turns_and_observations_are_the_conversation_and_only_turns_are_trained_on(tokenizer: PromptTokenizer):
    texts = ["a", "bb", "c"]
    (sample,) = asyncio.run(played(tokenizer, rollout(last=3), texts)).samples
    assert tokenizer.decode(sample.response_tokens) == "a" + AGAIN % "1:a" + "bb" + AGAIN % "2:bb" + "c"
    trained = [tokenizer.decode(sample.response_tokens[start:end]) for start, end in sample.turns]
    assert trained == texts
    assert sample.loss_mask.tolist() == sample.sampled.tolist()
    assert not sample.log_probs[~sample.loss_mask].any()
    assert sample.spans[-1].end == sample.response_length
    assert (sample.finish_reason, sample.environment_reward) == ("stop", 1.5)
    assert turn_metrics([sample]) == {
        "rollout/turns_mean": 3.0,
        "rollout/turns_max": 3.0,
        "rollout/observation_tokens_mean": float(np.count_nonzero(~sample.loss_mask)),
        "rollout/environment_errors": 0.0,
    }


@pytest.mark.parametrize(
    ("keys", "max_new_tokens", "text", "reason"),
    [
        ({"max_turns": 1}, 400, "aaaa", "length"),
        ({"max_turns": 1, "last": 1}, 400, "aaaa", "stop"),
        ({"max_turn_tokens": 2, "max_turns": 2}, 400, "aa" + AGAIN % "1:aa" + "bb", "length"),
        ({}, 3, "aaa", "length"),  # no room for the end of the first turn
        ({}, 5 + 26, "aaaa", "length"),  # nor for what would follow it
        ({"max_turns": 2}, 6 + 26, "aaaa" + AGAIN % "1:aaaa" + "b", "length"),  # nor for more than one token behind
    ],
)
def test_budgets_of_turns_tokens_of_a_turn_and_of_the_response(
    tokenizer: PromptTokenizer, keys: dict[str, Any], max_new_tokens: int, text: str, reason: str
):
    (sample,) = asyncio.run(played(tokenizer, rollout(**keys), ["aaaa", "bbbb"], max_new_tokens)).samples
    assert tokenizer.decode(sample.response_tokens) == text
    assert sample.response_length <= max_new_tokens
    assert sample.finish_reason == reason


def test_a_suspended_response_goes_on_as_if_it_had_not_been_wherever_that_was(tokenizer: PromptTokenizer):
    """Suspended at random places, saved and restored now and then, always with a new environment."""
    rng = np.random.default_rng(5)

    async def all_cases() -> None:
        cfg = rollout(max_turn_tokens=6, max_turns=4)
        async with open_turns(Script(tokenizer, []), tokenizer, cfg) as turns:
            for _ in range(25):
                texts = ["".join(rng.choice(list("ab c"), rng.integers(0, 9))) for _ in range(5)]
                limit = settings(tokenizer, int(rng.integers(1, 300)))
                whole, group = group_of(tokenizer), group_of(tokenizer)
                turns._engines = Script(tokenizer, texts)
                await turns.play([whole], [RECORD], limit, lambda _: False)
                turns._engines = Script(tokenizer, texts, rng.integers(0, 6, 12))
                while group.unfinished:
                    answers = iter(rng.random(50) < 0.4)
                    await turns.play([group], [RECORD], limit, lambda _: next(answers))  # noqa: B023
                    if group.unfinished and rng.random() < 0.5:
                        (group,) = unpack_groups(*pack_groups([group]))
                (a,), (b,) = whole.samples, group.samples
                assert a.response_tokens.tolist() == b.response_tokens.tolist()
                assert a.loss_mask.tolist() == b.loss_mask.tolist()
                assert (a.finish_reason, a.environment_reward) == (b.finish_reason, b.environment_reward)
                assert a.response_length <= limit.max_new_tokens

    asyncio.run(all_cases())


def test_a_turn_that_was_whole_when_the_sample_was_saved_is_answered_and_not_sampled_again(tokenizer: PromptTokenizer):
    async def goes_on() -> tuple[Sample, int]:
        script = Script(tokenizer, ["a", "b"])
        (sample,) = (group := group_of(tokenizer)).samples
        await script.generate([sample], settings(tokenizer))
        (group,) = unpack_groups(*pack_groups([group]))  # finished as far as the engine is concerned
        async with open_turns(script, tokenizer, rollout(last=2)) as turns:
            await turns.play([group], [RECORD], settings(tokenizer), lambda _: False)
        return group.samples[0], script.calls

    sample, calls = asyncio.run(goes_on())
    assert tokenizer.decode(sample.response_tokens) == "a" + AGAIN % "1:a" + "b"
    assert calls == 2


def test_an_environment_that_fails_leaves_its_sample_unjudged_and_the_others_alone(
    tokenizer: PromptTokenizer, caplog: pytest.LogCaptureFixture
):
    class Each(Script):
        """The first sample has its environment raise in its second turn."""

        async def generate(self, samples: Sequence[Sample], settings: SamplingSettings) -> None:
            self._turns[1] = [*tokenizer.encode_text("raise x" if samples[0].id.endswith("000.") else "fine"), 2]
            await super().generate(samples, settings)

    async def judged() -> Group:
        script = Each(tokenizer, ["a", "", "c"])
        group = group_of(tokenizer, 3)
        reward = RewardConfig(components=[{"name": "environment", "correctness": True}])
        async with open_turns(script, tokenizer, rollout("Faulty", last=3)) as turns, RewardPool(reward) as verifiers:
            await turns.play([group], [RECORD], settings(tokenizer), lambda _: False)
            await judge(group, RECORD, tokenizer, verifiers)
        return group

    failed, *others = asyncio.run(judged()).samples
    assert failed.finish_reason == ENVIRONMENT_FAILED
    assert not failed.valid
    assert not failed.truncated
    assert math.isnan(failed.correctness)
    assert "s000000000-000. is not judged: its environment failed: step raised ValueError: no x" in caplog.text
    assert [(s.finish_reason, s.reward, s.components) for s in others] == [("stop", 1.5, {"environment": 1.5})] * 2
    assert turn_metrics([failed, *others])["rollout/environment_errors"] == 1.0


def test_what_the_environment_says_first_is_a_message_of_the_prompt(tokenizer: PromptTokenizer):
    group = asyncio.run(played(tokenizer, rollout(opening="hello", last=1), ["a"], size=2))
    messages = (*RECORD.messages, {"role": "user", "content": "hello r1"})
    for sample in group.samples:
        assert sample.prompt_tokens.tolist() == tokenizer.encode(PromptRecord("r1", messages))
        assert tokenizer.decode(sample.response_tokens) == "a"


@pytest.mark.parametrize(
    ("cfg", "complaint"),
    [
        (rollout("OpensAnew"), "reset returned another text"),
        (rollout(opening="x" * 200, last=1), "max_prompt_tokens=200"),
    ],
)
def test_a_beginning_that_no_group_can_share_or_that_is_too_long_is_a_failure(
    tokenizer: PromptTokenizer, cfg: RolloutConfig, complaint: str, caplog: pytest.LogCaptureFixture
):
    group = asyncio.run(played(tokenizer, cfg, ["a"], size=2))
    assert [s.finish_reason for s in group.samples] == [ENVIRONMENT_FAILED] * 2
    assert complaint in caplog.text


def test_what_the_engines_raise_ends_the_whole_group(tokenizer: PromptTokenizer):
    class Broken(Script):
        async def generate(self, samples: Sequence[Sample], settings: SamplingSettings) -> None:
            if not samples[0].id.endswith("000."):
                await asyncio.sleep(1000)
            raise RuntimeError("the engine is gone")

    async def fails() -> None:
        async with open_turns(Broken(tokenizer, []), tokenizer, rollout()) as turns:
            with pytest.raises(RuntimeError, match="the engine is gone"):
                await turns.play([group_of(tokenizer, 3)], [RECORD], settings(tokenizer), lambda _: False)

    asyncio.run(fails())


def test_a_model_that_says_nothing_ends_the_conversation(tokenizer: PromptTokenizer):
    class Silent(Script):
        async def generate(self, samples: Sequence[Sample], settings: SamplingSettings) -> None:
            samples[0].finish("stop")

    async def plays() -> Sample:
        async with open_turns(Silent(tokenizer, []), tokenizer, rollout()) as turns:
            group = group_of(tokenizer)
            await turns.play([group], [RECORD], settings(tokenizer), lambda _: False)
        return group.samples[0]

    sample = asyncio.run(plays())
    assert (sample.finish_reason, sample.environment_reward, sample.response_length) == ("stop", 0.0, 0)


def test_without_an_environment_there_are_no_turns(tokenizer: PromptTokenizer):
    async def opened() -> Any:
        async with open_turns(Script(tokenizer, []), tokenizer, RolloutConfig()) as turns:
            return turns

    assert asyncio.run(opened()) is None
