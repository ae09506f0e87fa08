"""Settings that no step could run with are refused where they are given."""

import dataclasses

import pytest

from headrace.engine import AdamWConfig, EngineConfig, ParamGroup
from headrace.errors import ConfigError

ENGINE = {
    "weight_slots": 1,
    "gradient_slots": 0,
    "loss_chunk_tokens": 0,
    "chunk_bytes": 100,
    "micro_batches_per_wave": 0,
    "update_threads": 0,
    "activations": "forget",
    "clipping": "never",
}
OPTIMIZER = {"beta1": 1.0, "beta2": -0.1, "eps": 0.0, "weight_decay": -1.0}


@pytest.mark.parametrize("name", ENGINE)
def test_engine_settings_out_of_range(name):
    with pytest.raises(ConfigError, match=f"engine.{name} is {ENGINE[name]!r}"):
        EngineConfig(**{name: ENGINE[name]})


@pytest.mark.parametrize("name", OPTIMIZER)
def test_optimizer_settings_out_of_range(name):
    with pytest.raises(ConfigError, match=f"{name} is {OPTIMIZER[name]}"):
        AdamWConfig(**{name: OPTIMIZER[name]})


def test_pattern_that_is_no_regular_expression():
    with pytest.raises(ConfigError, match=r"pattern '\['"):
        ParamGroup(pattern="[")


@pytest.mark.parametrize("config", [EngineConfig(), AdamWConfig(), ParamGroup(pattern="x")])
def test_settings_are_frozen_and_defaults_hold(config):
    (first, *_) = dataclasses.fields(config)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config, first.name, None)
