"""How component values become a reward, which verifiers can be named, and what running one can give."""

import math
import re

import pytest

from megatron_rl.config.reward import RewardComponent, RewardConfig
from megatron_rl.data import PromptRecord
from megatron_rl.rewards import RewardError, RewardPool
from megatron_rl.rewards.compose import combine
from megatron_rl.rewards.evaluate import Evaluator, Outcome
from megatron_rl.rewards.registry import BUILT_IN, check_name, load_verifier

RECORD = PromptRecord("p", ({"role": "user", "content": "x"},), answer="12")
HOOKS = f"{__package__}.reward_hooks"


def components(*settings):
    return [RewardComponent(name=f"m:{index}", **setting) for index, setting in enumerate(settings)]


def total(values, *settings):
    return combine(Outcome(tuple(values), {}), components(*settings))


def test_the_total_is_the_weighted_sum_of_components_in_their_range():
    result = total([1.0, -0.5, 30.0], {"weight": 2.0}, {"weight": 0.5}, {"weight": 1.0, "range": (20, 40)})
    assert result.total == pytest.approx(2.0 - 0.25 + 0.5)
    assert result.components == {"m:0": 1.0, "m:1": -0.5, "m:2": 30.0}
    assert result.errors == {}


def test_correctness_is_the_flagged_component_raw_else_the_total():
    assert total([0.5, 3.0], {}, {"weight": 0.1, "range": (0, 4), "correctness": True}).correctness == 3.0
    assert total([0.5, 3.0], {}, {"weight": 0.1}).correctness == pytest.approx(0.8)


def test_a_failed_component_makes_the_total_nan_unless_its_weight_is_zero():
    failed = Outcome((1.0, math.nan), {1: "raised ValueError"})
    result = combine(failed, components({"correctness": True}, {"weight": 0.1}))
    assert math.isnan(result.total)
    assert result.correctness == 1.0
    assert result.errors == {"m:1": "raised ValueError"}
    assert combine(failed, components({}, {"weight": 0.0})).total == 1.0


def test_a_value_outside_its_range_is_a_failure_rounding_is_not():
    result = total([1.5], {"range": (0, 1)})
    assert math.isnan(result.total)
    assert result.errors == {"m:0": "returned 1.5, outside its range 0 .. 1"}
    assert total([1 + 1e-9], {"range": (0, 1)}).total == 1.0
    assert total([-2 - 1e-9], {"range": (-2, 2)}).total == 0.0


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_built_in_verifier_loads_and_runs(name):
    record = PromptRecord("p", RECORD.messages, answer="12", extra={"numbers": [12], "environment_reward": 0.5})
    outcome = Evaluator([(name, {})])("\\boxed{12}", record)
    assert outcome.errors == {}
    assert 0.0 <= outcome.values[0] <= 1.0


@pytest.mark.parametrize(
    ("name", "args", "expected"),
    [
        ("soting", {}, "'soting' is unknown (did you mean 'sorting'?); allowed are countdown, "),
        (":f", {}, "and module:function for a function of your own"),
        ("no_such_module:f", {}, "module 'no_such_module' cannot be imported (ModuleNotFoundError"),
        (f"{HOOKS}:nothing", {}, "has no 'nothing'"),
        (f"{HOOKS}:factor", {}, "'factor' is int, not a function"),
        (f"{HOOKS}:later", {}, "'later' is async"),
        (f"{HOOKS}:one_argument", {}, "one_argument(response) and cannot be called as (response, record)"),
        (f"{HOOKS}:length", {"scal": 2}, "(response, record, scal=...): got an unexpected keyword argument 'scal'"),
        ("sorting", {"strict": True}, "unexpected keyword argument 'strict'"),
    ],
)
def test_a_verifier_that_cannot_be_used_is_one_message(name, args, expected):
    with pytest.raises(RewardError) as caught:
        load_verifier(name, args)
    assert expected in str(caught.value)


def test_names_are_checked_without_importing_anything():
    check_name("no_such_module:f")
    with pytest.raises(RewardError, match="unknown"):
        check_name("no_such_module")


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ("raise key", r"raised LookupError: no key \(.*reward_hooks.py:\d+\)"),
        ("exit", r"raised SystemExit: 0 \(.*reward_hooks.py:\d+\)"),
        ("nan", "returned nan"),
        ("inf", "returned inf"),
        ("text", "returned str, not a number"),
        ("long", r"raised OverflowError: int too large to convert to float"),
        ("huge", r"returned -1e\+308, not within -1e\+30 .. 1e\+30"),
    ],
)
def test_what_a_verifier_does_wrong_is_a_reason_not_an_exception(response, reason):
    outcome = Evaluator([("exact", {}), (f"{HOOKS}:obey", {})])(response, RECORD)
    assert outcome.values[0] == 0.0
    assert math.isnan(outcome.values[1])
    assert list(outcome.errors) == [1]
    assert re.fullmatch(reason, outcome.errors[1])


def test_arguments_reach_the_verifier_and_booleans_count_as_numbers():
    evaluate = Evaluator([(f"{HOOKS}:length", {"scale": 0.5}), (f"{HOOKS}:obey", {})])
    assert evaluate("env PATH", RECORD).values == (4.0, 1.0)


def test_a_verifier_that_could_hang_needs_a_worker():
    for name in ("math", f"{HOOKS}:length"):
        config = RewardConfig(components=[RewardComponent(name="exact"), RewardComponent(name=name)])
        with pytest.raises(RewardError, match=f"{name} could hang it; set reward.workers to 1 or more"):
            RewardPool(config)
