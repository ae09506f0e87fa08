"""Runs that train adapters or a part of the model: files, resume, merging, what stays as it was."""

import json
import warnings
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from headrace.cli import main
from headrace.errors import CheckpointError, ConfigError, DataError, ModelRefusedError
from headrace.trainer import train
from headrace.trainer.config import resolve
from headrace.trainer.export import export_checkpoint, export_merged

LORA = {"model_config": None, "adapter": "lora", "lora_r": 4, "lora_alpha": 8}


@pytest.fixture
def base(run_config, tiny_model, tmp_path):
    """A small trained model."""
    result = run_config(
        model_config=tiny_model(tied=False, num_hidden_layers=3),
        output_dir=str(tmp_path / "base"),
        max_steps=2,
        dtype="float32",
    )
    return export_checkpoint(result.checkpoint, tmp_path / "model").folder


@pytest.fixture
def lora(make_config, base):
    """A run's keys with adapters; keyword arguments replace keys."""
    return lambda **keys: make_config(**LORA | {"model_name_or_path": str(base)} | keys)


def first_row(folder):
    return json.loads((Path(folder) / "metrics.jsonl").read_text().splitlines()[0])


def logits(model):
    ids_BT = torch.arange(24).view(2, 12) % 50
    with torch.no_grad():
        return model.eval()(ids_BT, use_cache=False).logits.float()


def with_peft(base, folder, dtype):
    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype, attn_implementation="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's use of transformers' deprecated names
        return PeftModel.from_pretrained(model, folder)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_peft_loads_what_was_trained_and_the_merged_model_agrees(lora, base, tmp_path, dtype):
    result = train(lora(dtype=dtype))
    names = {file.name for file in result.checkpoint.iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json"} <= names
    assert not [name for name in names if name.startswith("model")]
    adapter = load_file(result.checkpoint / "adapter_model.safetensors")
    assert all(".lora_" in name for name in adapter)
    assert all(bool(value.any()) for value in adapter.values())  # B has moved off zero

    tuned = logits(with_peft(base, result.checkpoint, torch.float32))
    untuned = logits(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32))
    assert (tuned - untuned).abs().max() > 0.1
    with pytest.raises(SystemExit) as ended:
        main(["export", str(tmp_path / "run"), str(tmp_path / "merged"), "--merge"])
    assert not ended.value.code
    merged = AutoModelForCausalLM.from_pretrained(
        tmp_path / "merged", dtype=torch.float32, attn_implementation="eager"
    )
    allowed = 1e-5 if dtype == "float32" else 2e-2  # one rounding of every weight to bfloat16
    assert (logits(merged) - tuned).abs().max() <= allowed * tuned.abs().max()


def test_a_stopped_run_ends_with_the_same_bits(lora, tmp_path):
    keys = {"lora_modules_to_save": ["norm"], "lora_dropout": 0.1}
    whole = train(lora(**keys, output_dir=str(tmp_path / "whole")))
    keys = lora(**keys, save_strategy="steps", save_steps=3)
    train(keys | {"num_train_epochs": 99})
    for name in ("checkpoint-6", "checkpoint-8"):
        (tmp_path / "run" / name).rename(tmp_path / name)
    again = train(keys | {"resume_from_checkpoint": "auto"})
    for file in ("adapter_model.safetensors", "optimizer.safetensors"):
        one, other = load_file(whole.checkpoint / file), load_file(again.checkpoint / file)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one), file


def test_adapters_on_experts_are_saved_resumed_merged_and_gone_on_from(
    run_config, tiny_model, make_config, tmp_path
):
    """One adapter an expert, in PEFT's format; the merged model has experts as they are written."""
    model = tiny_model(
        "qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, tied=False
    )
    first = run_config(
        model_config=model, output_dir=str(tmp_path / "base"), max_steps=2, dtype="float32"
    )
    base = export_checkpoint(first.checkpoint, tmp_path / "model").folder
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    keys = LORA | {
        "model_name_or_path": str(base), "lora_target_modules": ["q_proj"], "dtype": "float32",
        "lora_target_parameters": parameters,
    }  # fmt: skip
    result = train(make_config(**keys, save_strategy="steps", save_steps=3))
    adapter = load_file(result.checkpoint / "adapter_model.safetensors")
    assert all(bool(value.any()) for value in adapter.values())
    assert sum("experts" in name for name in adapter) == 2 * 2 * 2  # layers, parameters, A and B

    tuned = logits(with_peft(base, result.checkpoint, torch.float32))
    merged = export_merged(tmp_path / "run", tmp_path / "merged").folder
    assert "model.layers.0.mlp.experts.3.gate_proj.weight" in load_file(
        merged / "model.safetensors"
    )
    alone = AutoModelForCausalLM.from_pretrained(merged, attn_implementation="eager")
    assert (logits(alone) - tuned).abs().max() <= 1e-5 * tuned.abs().max()

    for name in ("checkpoint-6", "checkpoint-8"):
        (tmp_path / "run" / name).rename(tmp_path / name)
    again = train(make_config(**keys, resume_from_checkpoint="auto"))
    resumed = load_file(again.checkpoint / "adapter_model.safetensors")
    assert all(torch.equal(resumed[name], value) for name, value in adapter.items())

    keys = LORA | {"model_name_or_path": str(base), "dtype": "float32"}
    given = {"lora_model_dir": str(result.checkpoint), "output_dir": str(tmp_path / "second")}
    on = train(make_config(**keys, **given, learning_rate=1e-12, weight_decay=0.0))
    gone_on = load_file(on.checkpoint / "adapter_model.safetensors")
    assert adapter.keys() == gone_on.keys()
    assert all(torch.allclose(gone_on[n], value, atol=1e-9) for n, value in adapter.items())
    with pytest.raises(ConfigError, match="lora_target_parameters has no effect beside"):
        train(make_config(**keys, **given, lora_target_parameters=parameters))


@pytest.mark.parametrize("adapters_first", [True, False])
def test_adapters_and_all_weights_do_not_resume_each_other(lora, make_config, base, adapters_first):
    whole = make_config(model_config=None, model_name_or_path=str(base))
    keys = {"max_steps": 1, "dtype": "float32", "resume_from_checkpoint": "auto"}
    first, second = (lora(), whole) if adapters_first else (whole, lora())
    train(first | keys)
    with pytest.raises(CheckpointError, match="this run trains") as caught:
        train(second | keys | {"max_steps": 2})
    assert caught.value.remedy


def test_training_goes_on_from_an_adapter(lora, base, tmp_path):
    first = train(lora(peft_use_rslora=True, lora_target_modules=["q_proj", "down_proj"]))
    folder = export_checkpoint(first.checkpoint, tmp_path / "adapter").folder
    keys = {"output_dir": str(tmp_path / "second"), "lora_model_dir": str(folder)}
    second = train(lora(**keys, learning_rate=1e-12, weight_decay=0.0))
    one = load_file(folder / "adapter_model.safetensors")
    other = load_file(second.checkpoint / "adapter_model.safetensors")
    assert one.keys() == other.keys()
    assert all(torch.allclose(one[name], other[name], atol=1e-9) for name in one)
    values = json.loads((second.checkpoint / "adapter_config.json").read_text())
    assert values["use_rslora"] is True
    assert sorted(values["target_modules"]) == ["down_proj", "q_proj"]
    with pytest.raises(ConfigError, match="lora_r is 3"):
        train(lora(**keys | {"output_dir": str(tmp_path / "third")}, lora_r=3))
    values["use_dora"] = True
    (folder / "adapter_config.json").write_text(json.dumps(values))
    with pytest.raises(DataError, match="use_dora"):
        train(lora(**keys | {"output_dir": str(tmp_path / "third")}))


def test_dropout_is_saved_and_goes_on(lora, tmp_path):
    losses = []
    for dropout in (0.0, 0.3):  # B begins at zero, so that the first steps say nothing
        keys = {"output_dir": str(tmp_path / f"run{dropout}"), "max_steps": 4}
        result = train(lora(**keys, lora_dropout=dropout))
        saved = json.loads((result.checkpoint / "adapter_config.json").read_text())
        assert saved["lora_dropout"] == dropout
        losses.append(result.loss)
    assert losses[0] != losses[1]
    folder = export_checkpoint(result.checkpoint, tmp_path / "adapter").folder
    for number, (keys, wanted) in enumerate((({}, 0.3), ({"lora_dropout": 0.0}, 0.0))):
        out = str(tmp_path / f"next{number}")
        again = train(lora(**keys, lora_model_dir=str(folder), output_dir=out, max_steps=1))
        saved = json.loads((again.checkpoint / "adapter_config.json").read_text())
        assert saved["lora_dropout"] == wanted


def test_whole_modules_are_trained_and_saved_with_the_adapters(lora, base, tmp_path):
    result = train(lora(lora_modules_to_save=["lm_head", "embed_tokens"], dtype="float32"))
    adapter = load_file(result.checkpoint / "adapter_model.safetensors")
    before = load_file(base / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert not torch.equal(adapter[f"base_model.model.{name}"], before[name])
    tuned = logits(with_peft(base, result.checkpoint, torch.float32))
    merged = export_merged(result.checkpoint, tmp_path / "merged").folder
    model = AutoModelForCausalLM.from_pretrained(merged, attn_implementation="eager")
    assert (logits(model) - tuned).abs().max() <= 1e-5 * tuned.abs().max()


def test_adapters_say_whose_they_are_and_load_by_themselves(lora, base, tmp_path, monkeypatch):
    monkeypatch.chdir(base.parent)
    result = train(lora(model_name_or_path=base.name, dtype="float32"))
    folder = export_checkpoint(result.checkpoint, tmp_path / "adapter").folder
    monkeypatch.chdir(tmp_path.parent)  # where the base's relative path leads nowhere
    saved = json.loads((folder / "adapter_config.json").read_text())
    assert saved["base_model_name_or_path"] == str(base.resolve())
    tuned = logits(with_peft(base, folder, torch.float32))
    alone = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    assert torch.equal(logits(alone), tuned)


def test_a_base_holds_two_bytes_a_parameter(lora, base, tmp_path):
    result = train(lora())
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    adapter = load_file(result.checkpoint / "adapter_model.safetensors")
    trained = sum(value.numel() for value in adapter.values())
    assert record["num_parameters"] == sum(
        value.numel() for value in load_file(base / "model.safetensors").values()
    )
    assert record["state_bytes"] == 2 * record["num_parameters"] + 12 * trained
    assert record["num_trained_parameters"] == trained
    assert (record["adapters"]["rank"], record["adapters"]["alpha"]) == (4, 8)
    assert "self_attn.q_proj" in record["adapters"]["targets"]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"lora_target_modules": ["q_prj"]}, "did you mean q_proj"),
        ({"lora_target_modules": ["q_proj", "lm_head"]}, "lm_head are not supported"),
        ({"lora_target_modules": ["embed_tokens"]}, "embed_tokens are not supported"),
        ({"lora_target_linear": True, "lora_target_modules": ["q_proj", "gate"]}, "'gate' is no"),
        ({"lora_dropout": 1.0}, "less than 1"),
        ({"lora_dropout": -0.1}, "greater than or equal to 0"),
        ({"adapter": "qlora"}, "unquantised"),
        ({"adapter": None}, "without an adapter"),
        ({"adapter": None, "lora_r": None, "lora_alpha": None, "lora_dropout": 0.1}, "without an"),
        ({"unfrozen_parameters": ["model"]}, "freezes the model"),
        ({"lora_modules_to_save": ["nothing"]}, "no module"),
        ({"peft_use_dora": True}, "DoRA"),
    ],
)
def test_what_adapters_cannot_be_is_refused(lora, keys, message):
    with pytest.raises((ConfigError, ModelRefusedError), match=message):
        train(lora(**keys))


@pytest.mark.parametrize(
    ("keys", "rank", "targets"),
    [
        ({"lora_rank": 2, "lora_target": "all", "finetuning_type": "lora"}, 2, "all-linear"),
        ({"lora_r": 2, "lora_target": "q_proj, v_proj"}, 2, ("q_proj", "v_proj")),
        ({"lora_r": 16, "use_peft": True, "lora_target_modules": ".*q_proj"}, 16, ".*q_proj"),
        ({"lora_r": 8, "lora_target_linear": True, "lora_target_modules": None}, 8, "all-linear"),
    ],
)
def test_names_of_other_trainers_mean_the_same(make_config, keys, rank, targets):
    given = make_config(model_config=None, model_name_or_path="m", adapter="lora", **keys)
    settings = resolve(given)[0].lora_settings()
    assert (settings.rank, settings.target_modules) == (rank, targets)


def test_frozen_parameters_stay_bit_by_bit_and_have_no_moments(make_config, base, tmp_path):
    keys = {"model_config": None, "model_name_or_path": str(base), "dtype": "float32"}
    patterns = {
        "unfrozen_parameters": ["model.layers.[01].", "^model.norm.weight$"],
        "frozen_parameters": [".*layernorm"],
    }
    result = train(make_config(**keys, **patterns))
    before = load_file(base / "model.safetensors")
    after = load_file(result.checkpoint / "model.safetensors")
    moments = load_file(result.checkpoint / "optimizer.safetensors")
    trained = {name for name in before if name.startswith(("model.layers.0", "model.layers.1"))}
    trained = {name for name in trained if "layernorm" not in name} | {"model.norm.weight"}
    for name, value in before.items():
        assert torch.equal(value, after[name]) == (name not in trained), name
    assert {name.rpartition(".")[0] for name in moments} == trained


def test_the_gradient_norm_is_that_of_what_is_trained(make_config, base, tmp_path):
    keys = {"model_config": None, "model_name_or_path": str(base), "dtype": "float32"}
    norms = []
    for number, pattern in enumerate(("model.norm", "(?!model.norm)", ".*")):
        out = str(tmp_path / f"norm{number}")
        train(make_config(**keys, output_dir=out, unfrozen_parameters=[pattern], max_steps=1))
        norms.append(first_row(out)["grad_norm"])
    part, rest, whole = norms
    assert part**2 + rest**2 == pytest.approx(whole**2, rel=1e-5)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"unfrozen_parameters": ["layers.0"]}, "matches no parameter"),
        ({"frozen_parameters": [".*"]}, "nothing to train"),
        ({"unfrozen_parameters": ["^model.embed_tokens.weight$[:100]"]}, "whole"),
        ({"unfrozen_parameters": ["("]}, "unfrozen_parameters"),
    ],
)
def test_a_choice_that_cannot_be_is_refused(make_config, keys, message):
    with pytest.raises(ConfigError, match=message):
        train(make_config(**keys))
