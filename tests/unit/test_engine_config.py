"""Settings that no step could run with are refused where they are given."""

import dataclasses
import math

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
    "lane_timeout_seconds": 0.0,
    "lane_jitter_seconds": -1.0,
    "activations": "forget",
    "clipping": "never",
}
OPTIMIZER = {"beta1": 1.0, "beta2": -0.1, "epsilon": 0.0, "weight_decay": -1.0}


@pytest.mark.parametrize("name", ENGINE)
def test_engine_settings_out_of_range(name):
    with pytest.raises(ConfigError, match=f"engine.{name} is {ENGINE[name]!r}"):
        EngineConfig(**{name: ENGINE[name]})


def test_more_threads_than_a_pool_has():
    with pytest.raises(ConfigError, match="at most 1024"):
        EngineConfig(update_threads=100_000)


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_group_settings_out_of_range(value):
    for name in ("learning_rate_scale", "weight_decay"):
        with pytest.raises(ConfigError, match=f"{name} is {value}"):
            ParamGroup(pattern="x", **{name: value})


@pytest.mark.parametrize("name", OPTIMIZER)
def test_optimizer_settings_out_of_range(name):
    with pytest.raises(ConfigError, match=f"{name} is {OPTIMIZER[name]}"):
        AdamWConfig(**{name.removesuffix("ilon"): OPTIMIZER[name]})


def test_pattern_that_is_no_regular_expression():
    with pytest.raises(ConfigError, match=r"pattern '\['"):
        ParamGroup(pattern="[")


@pytest.mark.parametrize("config", [EngineConfig(), AdamWConfig(), ParamGroup(pattern="x")])
def test_settings_are_frozen_and_defaults_hold(config):
    (first, *_) = dataclasses.fields(config)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config, first.name, None)
