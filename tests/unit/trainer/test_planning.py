"""A training file in ``headrace plan``: no key that changes the answer is passed over."""

import json
from dataclasses import fields

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoConfig
from typer.testing import CliRunner

from headrace.cli.plan import app
from headrace.engine.config import EngineConfig
from headrace.errors import ConfigError
from headrace.models.lora import LoraSettings
from headrace.models.spec import ModelSpec
from headrace.plan.architecture import read_architecture
from headrace.plan.job import THIS_VERSION, Job, Trained
from headrace.plan.machine import describe_machine
from headrace.plan.memory import footprint
from headrace.plan.parts import layer_modes
from headrace.plan.source import find_model, inline_model
from headrace.policy.budget import Workload, step_budget
from headrace.trainer.config import TrainConfig
from headrace.trainer.planning import NO_EFFECT, plan_job

MODEL = find_model("Qwen/Qwen3-0.6B").config | {
    "num_hidden_layers": 4,
    "vocab_size": 2048,
    "tie_word_embeddings": False,
}
LORA = {"adapter": "lora", "lora_r": 4}


@pytest.fixture
def folder(tmp_path):
    """A model's folder, and an epoch of 120,000 tokens in 6 documents."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL))
    rows = pa.table({"input_ids": pa.array([[1] * 20_000] * 6, pa.list_(pa.int32()))})
    pq.write_table(rows, tmp_path / "tokens.parquet")
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": "word " * 8000}) + "\n")
    return tmp_path


@pytest.fixture
def plan(folder):
    """The JSON of a plan of a training file with these keys."""

    def run(*arguments, **keys):
        given = {
            "model_name_or_path": str(folder / "model"),
            "datasets": [{"path": str(folder / "tokens.parquet"), "type": "tokens"}],
            "output_dir": str(folder / "run"),
            "max_length": 512,
            "num_train_epochs": 2,
            "save_steps": 4,
        } | keys
        path = folder / "run.yaml"
        path.write_text(
            json.dumps({key: value for key, value in given.items() if value is not ...})
        )
        done = CliRunner().invoke(
            app, [str(path), "--gpu", "h200", "--host-memory", "64GiB", "--json", *arguments]
        )
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return json.loads(done.stdout)

    return run


# A change of every key that is not named in NO_EFFECT.
CHANGES = {
    "model_name_or_path": {"model_name_or_path": "Qwen/Qwen3-8B"},
    "scratch_config": {"model_name_or_path": ..., "model_config": MODEL | {"vocab_size": 4096}},
    "tokenizer_name_or_path": {
        "model_name_or_path": ..., "tokenizer_name_or_path": "later",
        "model_config": {key: value for key, value in MODEL.items() if key != "vocab_size"},
    },
    "gguf_file": {"gguf_file": "model.gguf"},
    "dtype": {"dtype": "float32"},
    "adapter": LORA,
    "lora_r": LORA | {"lora_r": 16},
    "lora_target_modules": LORA | {"lora_target_modules": ["q_proj"]},
    "lora_target_linear": LORA | {"lora_target_linear": True},
    "lora_modules_to_save": LORA | {"lora_modules_to_save": ["lm_head", "embed_tokens"]},
    "peft_layers_to_transform": LORA | {"peft_layers_to_transform": [0]},
    "unfrozen_parameters": {"unfrozen_parameters": [r"model\.layers\.3\."]},
    "frozen_parameters": {"frozen_parameters": [r"model\.embed_tokens"]},
    "datasets": {"datasets": [{"path": "text.jsonl"}]},
    "val_set_size": {"val_set_size": 0.5},
    "max_length": {"max_length": 1024},
    "packing": {"packing": False},
    "per_device_train_batch_size": {"per_device_train_batch_size": 4},
    "gradient_accumulation_steps": {"gradient_accumulation_steps": 4},
    "num_train_epochs": {"num_train_epochs": 0.5},
    "max_steps": {"max_steps": 7},
    "max_grad_norm": {"max_grad_norm": 0},
    "save_strategy": {"save_strategy": "epoch"},
    "save_steps": {"save_steps": 0.1},
    "save_total_limit": {"save_total_limit": 2},
    "async_save": {"async_save": False},
    "async_save_memory": {"async_save_memory": "3GiB"},
    "engine": {"engine": {"weight_slots": 4}},
    "activations": {"engine": {"activations": "offload"}},
    "recompute_layers": {"engine": {"recompute_layers": 2}},
    "offload_layers": {"engine": {"offload_layers": 2}},
    "device_units": {"engine": {"device_units": 3}},
    "rows_per_micro_batch": {"engine": {"rows_per_micro_batch": 2}},
    "micro_batches_per_wave": {
        "engine": {"micro_batches_per_wave": 1}, "gradient_accumulation_steps": 4,
    },
    "weight_slots": {"engine": {"weight_slots": 2}},
    "gradient_slots": {"engine": {"gradient_slots": 3}},
    "clipping": {"engine": {"clipping": "deferred"}},
    "loss_chunk_tokens": {"engine": {"loss_chunk_tokens": 64}},
    "gradient_dtype": {"engine": {"gradient_dtype": "float32"}},
    "compile": {"engine": {"compile": False}},
}  # fmt: skip
# Those whose change is shown elsewhere: where nothing else is named, an adapter's folder, experts.
ELSEWHERE = {
    "device", "lora_model_dir", "lora_target_parameters", "streaming", "expert_slices", "tune_file",
}  # fmt: skip


def test_every_key_is_read_or_named():
    known = set(TrainConfig.model_fields) | {field.name for field in fields(EngineConfig)}
    assert known >= NO_EFFECT
    assert known - NO_EFFECT == set(CHANGES) | (ELSEWHERE & known)


@pytest.mark.parametrize("key", CHANGES)
def test_a_key_that_changes_the_answer_is_not_passed_over(plan, folder, monkeypatch, key):
    monkeypatch.chdir(folder)
    keys = CHANGES[key]
    without = {name: value for name, value in keys.items() if name in LORA}
    if key in ("adapter", "lora_target_linear"):
        without = {}
    if key == "micro_batches_per_wave":
        without = {"gradient_accumulation_steps": 4}
    if key == "lora_r":
        without = LORA
    assert plan(**keys) != plan(**without)


@pytest.mark.parametrize(
    "keys",
    [
        {"lora_target_modules": ["q_proj", "v_proj"]},
        {"peft_layers_to_transform": [1]},
        {"lora_target_modules": ["q_proj"], "lora_modules_to_save": ["lm_head"]},
    ],
)
def test_adapters_are_counted_where_they_are(plan, keys):
    out = plan(**LORA, **keys)
    settings = TrainConfig(
        model_name_or_path="x", datasets=[{"path": "x"}], output_dir="x", **LORA, **keys
    ).lora_settings()
    assert isinstance(settings, LoraSettings)
    spec = ModelSpec.from_config(AutoConfig.for_model(**MODEL), lora=settings)
    host = {item["kind"]: item["bytes"] for item in out["plan"]["host"]}
    assert host["master weights"] == 4 * spec.num_trainable_parameters
    assert out["job"]["trained"]["total"] == spec.num_trainable_parameters


def test_adapters_on_every_expert_are_counted(plan):
    """A published run's 945M adapter weights beside this model are these, at rank 16."""
    keys = {
        "model_name_or_path": "Qwen/Qwen3.5-35B-A3B-Base",
        "adapter": "lora",
        "lora_r": 16,
        "lora_target_modules": "all-linear",
        "lora_target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
    }
    trained = plan(**keys)["job"]["trained"]
    experts = 40 * 256 * 16 * ((2048 + 2 * 512) + (512 + 2048))
    assert trained["added"] == trained["total"]
    assert 0 < trained["total"] - experts < 0.03 * experts
    assert round(trained["total"] / 1e6) == 945


def test_layers_whose_experts_have_adapters_are_planned_whole(plan):
    """As they are trained: no smaller card is named because experts could be sent in slices."""
    keys = {
        "model_name_or_path": "Qwen/Qwen3.5-35B-A3B-Base", "adapter": "lora", "lora_r": 16,
        "lora_target_modules": "all-linear", "max_length": 2048,
        "per_device_train_batch_size": 8, "gradient_accumulation_steps": 4,
        "engine": {"activations": "recompute"},
    }  # fmt: skip
    on_experts = {"lora_target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
    small = ["--gpu", "rtx-4090", "--host-memory", "64GiB"]
    assert plan(*small, **keys)["plan"]["expert_slices"] > 1
    assert plan(*small, **keys, **on_experts)["plan"]["expert_slices"] == 1
    with pytest.raises(ConfigError, match="experts have adapters"):
        plan(*small, **keys | {"engine": {"expert_slices": 2}}, **on_experts)


def test_frozen_parameters_have_two_bytes_on_the_host(plan):
    whole, part = plan(), plan(frozen_parameters=[r"model\.embed_tokens"])
    count = MODEL["vocab_size"] * MODEL["hidden_size"]
    host = {item["kind"]: item["bytes"] for item in part["plan"]["host"]}
    assert host["frozen weights"] == 2 * count
    assert host["master weights"] == 4 * (whole["model"]["num_parameters"] - count)


def test_the_length_of_a_run_comes_from_its_data(plan, folder):
    counted = plan(save_total_limit=3)
    assert counted["job"]["num_tokens"] == 2 * 120_000
    assert counted["hours"] > 0
    assert counted["job"]["num_checkpoints"] == 3
    text = plan(datasets=[{"path": str(folder / "text.jsonl")}], num_train_epochs=1)
    assert text["job"]["num_tokens"] == (folder / "text.jsonl").stat().st_size // 4
    assert any("estimated at 4 bytes" in note for note in text["notes"])
    mixed = plan(
        datasets=[
            {"path": str(folder / "tokens.parquet"), "type": "tokens", "weight": 0.9},
            {"path": str(folder / "text.jsonl"), "weight": 0.1},
        ],
        num_train_epochs=1,
    )
    assert mixed["job"]["num_tokens"] == round((folder / "text.jsonl").stat().st_size // 4 / 0.1)
    given = plan("--tokens", "1M")
    assert given["job"]["num_tokens"] == 1_000_000
    unknown = plan(datasets=[{"path": "not there"}])
    assert unknown["hours"] is None
    assert any("--tokens" in note for note in unknown["notes"])


def test_values_of_the_command_line_win(plan):
    assert plan("max_length=256")["job"]["max_length"] == 256
    assert plan("--model", "Qwen/Qwen3-8B")["model"]["name"] == "Qwen/Qwen3-8B"


def test_experts_are_sent_in_as_many_slices_as_the_file_says(plan, folder):
    (folder / "moe").mkdir()
    (folder / "moe" / "config.json").write_text(
        json.dumps(find_model("Qwen/Qwen3-30B-A3B").config | {"num_hidden_layers": 2})
    )
    moe = {"model_name_or_path": str(folder / "moe")}
    whole, sliced = (plan(**moe, engine={"expert_slices": n})["plan"] for n in (1, 4))
    assert (whole["expert_slices"], sliced["expert_slices"]) == (1, 4)
    assert plan(**moe, device="cpu")["plan"]["expert_slices"] == 1
    slots = [
        {i["kind"]: i["bytes"] for i in out["device"]}["weight slots"] for out in (whole, sliced)
    ]
    assert slots[1] < slots[0]


def test_device_cpu_plans_for_the_processor(plan, folder):
    plan(device="cpu")
    done = CliRunner().invoke(app, [str(folder / "run.yaml"), "--json"])
    assert json.loads(done.stdout)["machine"]["gpu"] == "cpu"


def test_data_may_be_missing(plan):
    out = plan(datasets=..., output_dir=..., eval_steps=0.1)
    assert out["fits"]


@pytest.mark.parametrize("activations", ["keep", "offload", "recompute"])
@pytest.mark.parametrize(("recompute", "offload"), [(0, 0), (1, 0), (0, 3), (2, 3), (9, 9)])
@pytest.mark.parametrize("first", [0, 2, 7])
def test_layers_are_shared_out_as_the_engine_does(activations, recompute, offload, first):
    model = read_architecture(MODEL | {"num_hidden_layers": 7})
    engine = EngineConfig(
        activations=activations, recompute_layers=recompute, offload_layers=offload
    )
    trained = Trained(total=1, added=0, largest_layer=1, embedding=0, head=0, first_layer=first)
    job = Job(recompute_layers=recompute, offload_layers=offload, trained=trained)
    assert tuple(layer_modes(model, job, activations)) == engine.activation_plan(7, first)


def test_layers_below_what_is_trained_leave_nothing_and_have_no_backward(plan):
    last = MODEL["num_hidden_layers"] - 1
    whole, part = plan(), plan(unfrozen_parameters=[rf"model\.layers\.{last}\."])
    kept = [
        next(i["bytes"] for i in out["plan"]["device"] if i["kind"] == "kept activations")
        for out in (whole, part)
    ]
    assert kept[0] == MODEL["num_hidden_layers"] * kept[1]
    forward, backward = (
        [out["plan"]["speed"][phase]["compute"] for out in (whole, part)]
        for phase in ("forward", "backward")
    )
    assert forward[0] == forward[1]
    # Of four layers and a head: gradients of the last one's and the head's inputs, and its own.
    assert forward[1] * 0.3 < backward[1] < forward[1] < backward[0] / 1.9


def test_offloaded_activations_lie_on_the_host(plan):
    kept, sent = plan(), plan(engine={"activations": "offload"})
    device = [{i["kind"] for i in out["plan"]["device"]} for out in (kept, sent)]
    assert "kept activations" in device[0] - device[1]
    assert "offloaded activations" in {item["kind"] for item in sent["plan"]["host"]}
    assert sent["plan"]["speed"]["forward"]["d2h"] > 0


def test_units_on_the_device_leave_the_host(plan):
    base, placed = plan(), plan(engine={"device_units": 6})
    states = [
        {i["kind"]: i["bytes"] for i in out["plan"]["host"]}["master weights"]
        for out in (base, placed)
    ]
    assert states[1] == 0 < states[0]
    assert placed["plan"]["speed"]["forward"]["h2d"] == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"micro_batches_per_wave": 1},
        {"device_units": 3, "weight_slots": 2, "gradient_slots": 1},
        {"activations": "offload", "recompute_layers": 1, "gradient_dtype": "float32"},
    ],
)
def test_bytes_are_those_the_trainer_places_by(dtype, keys):
    """``headrace plan`` without torch, and the placement of a run, count the same."""
    spec = ModelSpec.from_config(AutoConfig.for_model(**MODEL))
    engine = EngineConfig(**{"recompute_layers": 0, "offload_layers": 0} | keys)
    config = TrainConfig(
        model_config=MODEL, datasets=[{"path": "x"}], output_dir="x", dtype=dtype, engine=engine,
        max_length=256, per_device_train_batch_size=2, gradient_accumulation_steps=3,
    )  # fmt: skip
    work = Workload(tokens=512, micro_batches=3, sequence_length=256, rows=2)
    budget = step_budget(spec, engine, dtype, work)
    source = inline_model("x", MODEL)
    job = plan_job(config, source, num_gpus=1, cpu=False)
    machine = describe_machine(gpu="h200", num_gpus=1, host_bytes=None)
    need = footprint(
        read_architecture(MODEL), job, machine, THIS_VERSION,
        activations=engine.activations, waves=work.num_waves(engine),
    )  # fmt: skip
    host = {item.kind: item.num_bytes for item in need.host}
    device = {item.kind: item.num_bytes for item in need.device}
    same = {
        "state": (host["master weights"] + host["optimizer state"], budget.host["state"]),
        "returned": (host["returned gradients"], budget.host["returned gradients"]),
        "offloaded": (
            host.get("offloaded activations", 0), budget.host["offloaded activations"],
        ),
        "slots": (device["weight slots"], budget.device["weight slots"]),
        "accumulators": (device["gradients"], budget.device["gradient accumulators"]),
        "resident": (
            device.get("state on the device", 0),
            budget.device["state on the device"] + budget.device["gradients kept on the device"],
        ),
    }  # fmt: skip
    for kind, (planned, placed) in same.items():
        assert planned == pytest.approx(placed, rel=0.02), kind
