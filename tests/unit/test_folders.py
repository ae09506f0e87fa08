"""A folder that is no model: what is said of it, and that models are never refused."""

import json

import pytest

from headrace.errors import ConfigError
from headrace.folders import check_model_folder
from headrace.models.building import load_config
from headrace.plan.source import find_model


@pytest.mark.parametrize("read", [load_config, find_model])
def test_every_reader_of_models_names_the_last_checkpoint_of_a_run(tmp_path, read):
    for name in ("checkpoint-9", "checkpoint-10", "checkpoint-10.damaged", "checkpoint-best"):
        (tmp_path / name).mkdir()
    with pytest.raises(ConfigError, match=r"is the folder of a run") as refused:
        read(str(tmp_path))
    assert f"such as {tmp_path / 'checkpoint-10'}," in str(refused.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"base_model_name_or_path": "models/base"}', "theirs is models/base"),
        ("{", "holds adapters, not a model"),
        ("[]", "holds adapters, not a model"),
    ],
)
def test_adapters_are_told_from_a_model(tmp_path, content, words):
    (tmp_path / "adapter_config.json").write_text(content)
    with pytest.raises(ConfigError, match=words):
        check_model_folder(tmp_path)


def test_what_may_be_a_model_is_left_to_its_reader(tmp_path):
    check_model_folder(tmp_path)
    check_model_folder(tmp_path / "absent")
    (tmp_path / "checkpoint-5").mkdir()
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    check_model_folder(tmp_path)
    check_model_folder(tmp_path / "config.json")
