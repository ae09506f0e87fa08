"""Runs of models with experts: the balancing loss as a key, the experts' load in the metrics."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from headrace.errors import ConfigError
from headrace.trainer import train

MOE = {
    "model_type": "qwen3_moe", "hidden_size": 32, "intermediate_size": 64,
    "moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 128, "initializer_range": 0.1,
}  # fmt: skip


@pytest.fixture
def weights(make_config, tmp_path):
    """Trains a model and gives its weights."""

    def run(name, model, **keys):
        out = str(tmp_path / name)
        result = train(make_config(model_config=model, output_dir=out, max_steps=3, **keys))
        return load_file(result.checkpoint / "model.safetensors")

    return run


def test_the_balancing_loss_of_the_key_is_that_of_the_configuration(weights, tmp_path):
    by_key = weights("key", MOE, router_aux_loss_coef=0.5)
    asked = MOE | {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    by_config = weights("config", asked)
    without = weights("without", MOE)
    off = weights("off", asked, router_aux_loss_coef=0.0)
    for name, value in by_key.items():
        assert torch.equal(value, by_config[name]), name
        assert torch.equal(without[name], off[name]), name
    name = "model.layers.0.mlp.gate.weight"
    assert not torch.equal(by_key[name], without[name])
    # What is exported is the model as it was, not as it was trained.
    saved = json.loads((tmp_path / "key" / "checkpoint-3" / "config.json").read_text())
    assert not saved.get("output_router_logits")


def test_the_load_of_experts_is_in_every_row(weights, tmp_path):
    weights("run", MOE, router_aux_loss_coef=0.01)
    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        assert row["busiest_expert"].keys() == row["num_idle_experts"].keys() == {"0", "1"}
        assert all(1 <= load <= 2 for load in row["busiest_expert"].values())
        assert row["auxiliary_loss"] == pytest.approx(2.0, rel=0.2)  # 2 of 4 experts, near even


def test_a_coefficient_that_nothing_uses_is_refused(weights, tiny_model):
    with pytest.raises(ConfigError, match="no balancing loss"):
        weights("dense", tiny_model(), router_aux_loss_coef=0.1)


def test_slices_of_experts_change_neither_weights_nor_checkpoints(make_config, tmp_path):
    """Two experts a token: the same bits. A run goes on with whole layers as it would have."""

    def run(**keys):
        # Without clipping: the blocks of a norm begin anew with each slice.
        keys = {"model_config": MOE, "max_steps": 4, "max_grad_norm": 0} | keys
        return load_file(train(make_config(**keys)).checkpoint / "model.safetensors")

    whole = run(output_dir=str(tmp_path / "whole"))
    engine = {"expert_slices": 3, "micro_batches_per_wave": 1}
    sliced = run(engine=engine, save_strategy="steps", save_steps=2)
    shutil.rmtree(tmp_path / "run" / "checkpoint-4")
    resumed = run(resume_from_checkpoint="auto")
    assert sliced.keys() == resumed.keys() == whole.keys()
    for name, value in whole.items():
        assert torch.equal(value, sliced[name]), name
        assert torch.equal(value, resumed[name]), name


def test_adapters_beside_slices_of_experts_are_saved_as_beside_whole_layers(make_config, tmp_path):
    """And go on without slices; the base's experts are in no file."""
    base = train(make_config(model_config=MOE, output_dir=str(tmp_path / "base"), max_steps=1))

    def run(name, slices, **keys):
        keys = {"adapter": "lora", "lora_r": 4, "lora_dropout": 0.2, "max_grad_norm": 0} | keys
        config = make_config(
            model_config=None,
            model_name_or_path=str(base.checkpoint),
            max_steps=4,
            output_dir=str(tmp_path / name),
            engine={"expert_slices": slices},
            **keys,
        )
        return load_file(train(config).checkpoint / "adapter_model.safetensors")

    whole = run("whole", 1)
    sliced = run("run", 3, save_strategy="steps", save_steps=2)
    shutil.rmtree(tmp_path / "run" / "checkpoint-4")
    resumed = run("run", 1, resume_from_checkpoint="auto")
    assert sliced.keys() == resumed.keys() == whole.keys()
    assert not any("experts" in name for name in whole)
    for name, value in whole.items():
        assert torch.equal(value, sliced[name]), name
        assert torch.equal(value, resumed[name]), name


def test_slices_of_a_model_without_experts_are_refused_before_training(make_config, tmp_path):
    with pytest.raises(ConfigError, match="has experts that lie stacked"):
        train(make_config(engine={"expert_slices": 2}))
    assert not list(tmp_path.glob("run/checkpoint-*"))
