"""`???`, OmegaConf's mark of a value that others have to give, is refused where a run would have to do without it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megatron_rl.config import Config, ConfigError, load_config
from tests.least import LEAST


def test_a_value_that_is_still_to_be_given_is_refused_wherever_it_stands(tmp_path: Path) -> None:
    base, recipe = tmp_path / "base.yaml", tmp_path / "recipe.yaml"
    base.write_text(json.dumps({**LEAST, "name": "${data.prompts}", "seed": "???"}))
    recipe.write_text('extends: base.yaml\nsteps: "???"\n')
    with pytest.raises(ConfigError, match=r"recipe.yaml: seed=\?\?\?, steps=\?\?\?: .* still to be given; write one"):
        load_config(recipe)
    assert load_config(recipe, ["steps=3", "seed=1"]).steps == 3
    for word in ("name", "optimizer.lr", "reward.components"):
        with pytest.raises(ConfigError, match=rf"the overrides: {word}=\?\?\?: .* write one"):
            load_config(recipe, ["steps=3", "seed=1", f"{word}=???"])
    recipe.write_text('extends: base.yaml\nreward: {components: ["???"]}\n')
    with pytest.raises(ConfigError, match=r"recipe.yaml: reward.components\[0\]=\?\?\?"):
        load_config(recipe, ["seed=1"])
    recipe.write_text('extends: base.yaml\nname: "???"\n')
    with pytest.raises(ConfigError, match=r"recipe.yaml: name=\?\?\?"):  # would be the parent's
        load_config(recipe, ["steps=3", "seed=1"])


@pytest.mark.parametrize("section", ["", *Config.model_fields])
def test_no_key_of_any_section_takes_the_mark_of_a_missing_value(tmp_path: Path, section: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(json.dumps(LEAST))
    fields = getattr(Config.model_fields[section].annotation if section else Config, "model_fields", {})
    for key in fields:
        word = f"{section}.{key}" if section else key
        with pytest.raises(ConfigError, match=re.escape(f"the overrides: {word}=???")):
            load_config(file, [f"{word}=???"])


@pytest.mark.parametrize("key", ["rollout", "rollout.environment_args", "rollout.environment_args.a", "reward", "name"])
def test_a_reference_to_what_is_not_given_is_one_plain_refusal_wherever_it_stands(tmp_path: Path, key: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(json.dumps(LEAST))
    with pytest.raises(ConfigError, match=rf"{key} refers to \$\{{vars\.x\}}, which is not given"):
        load_config(file, [f"{key}=${{vars.x}}"])
