"""``headrace plan``: the source's arithmetic, fits, changes, speed, money."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from dataclasses import fields, replace

import pytest
from typer.testing import CliRunner

from headrace.cli.plan import app
from headrace.engine.config import EngineConfig
from headrace.errors import ConfigError
from headrace.plan.architecture import read_architecture
from headrace.plan.choose import choose
from headrace.plan.fsdp import OPTIMIZERS, per_card_gigabytes, plan_fsdp
from headrace.plan.job import THIS_VERSION, Features, Job
from headrace.plan.machine import (
    Rate,
    card_names,
    describe_cpu,
    describe_machine,
    find_card,
)
from headrace.plan.memory import footprint, state_bytes, usable_device
from headrace.plan.predict import predict
from headrace.plan.source import find_model
from headrace.plan.speed import compute_seconds, matmul_seconds, predict_speed
from headrace.units import GIB

LATER = Features(
    moments=("float32", "bfloat16", "8bit"), state_on_device=True, selective_keep=False
)


def model(name: str):
    return read_architecture(find_model(name).config)


def h200(host_gib: float | None = 128, gpus: int = 1):
    host = None if host_gib is None else Rate(value=host_gib * GIB, origin="given")
    return describe_machine(gpu="h200", num_gpus=gpus, host_bytes=host, cores=16)


def run(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def test_arithmetic_of_the_source_document():
    gb = per_card_gigabytes(35_000_000_000, 8)
    assert gb["weights_gb"] == 70
    assert gb["optimizer_gb"] == 420
    assert gb["weights_gb_per_card"] == 8.75
    assert gb["gradients_gb_per_card"] == 8.75
    assert gb["optimizer_gb_per_card"] == 52.5
    assert gb["sharded_gb_per_card"] == 70
    assert gb["unsharded_gradient_gb_per_card"] == 70


def test_json_holds_the_source_documents_figures_offline():
    done = run("--model", "Qwen/Qwen3.5-35B-A3B-Base", "--gpu", "h100", "--gpus", "8", "--json")
    assert done.exit_code == 0, done.output
    out = json.loads(done.stdout)
    named = out["arithmetic"]["by_name"]
    assert (named["weights_gb"], named["optimizer_gb"]) == (70, 420)
    assert named["optimizer_gb_per_card"] == 52.5
    exact = out["arithmetic"]["exact"]
    assert exact["weights_gb"] == pytest.approx(69.3, abs=0.05)
    fsdp = out["fsdp"]
    assert fsdp["fits_without_accumulation"]
    assert not fsdp["fits_with_accumulation_under_no_sync"]
    assert fsdp["min_gpus"] == 8
    (published,) = out["published_runs"]
    assert published["num_steps"] * 16384 / published["seconds"] == pytest.approx(13_800, rel=0.01)


def test_accumulation_trap_decides_the_verdict_when_it_is_asked_for():
    machine = describe_machine(gpu="h100", num_gpus=8, host_bytes=None)
    big = model("Qwen/Qwen3.5-35B-A3B-Base")
    need = plan_fsdp(big, Job(accumulation=4), machine)
    assert need.unsharded_gradient_bytes == 2 * big.num_parameters
    assert need.fits
    assert not need.fits_accumulating
    one = predict(find_model("Qwen/Qwen3.5-35B-A3B-Base"), Job(accumulation=4), machine)
    assert not one.to_dict()["fsdp"]["fits"]


def test_optimizer_that_crashes_on_dtensors_is_named_with_its_report():
    failing = {name for note in OPTIMIZERS if not note.works for name in note.names}
    assert {"adamw_bnb_8bit", "paged_adamw_8bit"} <= failing
    note = next(n for n in OPTIMIZERS if "paged_adamw_8bit" in n.names)
    assert "bitsandbytes" in note.source
    assert "first optimizer.step()" in note.reason


@pytest.mark.parametrize(
    ("name", "moments", "gib"),
    [
        ("Qwen/Qwen3-8B", "float32", 91.5),
        ("Qwen/Qwen3-14B", "float32", 165),
        ("Qwen/Qwen3-14B", "8bit", 83),
        ("Qwen/Qwen3-30B-A3B", "float32", 341),
        ("Qwen/Qwen3-30B-A3B", "bfloat16", 227.5),
        ("Qwen/Qwen3-30B-A3B", "8bit", 171.5),
    ],
)
def test_state_bytes_of_known_models(name, moments, gib):
    assert state_bytes(model(name).num_parameters, moments) / GIB == pytest.approx(gib, abs=0.5)


@pytest.mark.parametrize("rate", [0.0, -1.0, 1e-300, float("nan"), float("inf")])
def test_an_update_rate_that_no_host_has_is_refused(rate):
    with pytest.raises(ConfigError, match="must be a number from"):
        describe_machine(gpu="h200", num_gpus=1, host_bytes=None, update_gparams=rate)
    host = Rate(value=GIB, origin="given")
    with pytest.raises(ConfigError, match="must be a number from"):
        describe_cpu(host_bytes=host, disk_bytes=None, cores=2, update_gparams=rate)


@pytest.mark.parametrize("price", [-1.0, float("nan"), float("inf")])
def test_a_price_that_nobody_asks_is_refused(price):
    with pytest.raises(ConfigError, match="must be finite and not negative"):
        Job(price=price)


def test_what_does_not_fit_exits_3_and_names_what_would_make_it_fit():
    common = ["--model", "Qwen/Qwen3-32B", "--gpu", "h200", "--json"]
    done = run(*common, "--host-memory", "128GiB")
    assert done.exit_code == 3
    out = json.loads(done.stdout)
    assert not out["fits"]
    assert out["plan"]["overflows"] == ["device"]  # which holds what the host cannot
    said = run(*common[:-1], "--host-memory", "128GiB").stdout.splitlines()[1]
    assert "too little host memory, and on the cards no room for the rest of the state" in said
    settings = [c["setting"] for c in out["changes"]]
    assert out["changes"][0]["available"]
    assert settings[0].startswith("--host-memory ")
    assert "Qwen/Qwen3-14B" in out["models_that_fit"]
    assert run(*common, *settings[0].split()).exit_code == 0


@pytest.mark.parametrize("name", ["Qwen/Qwen3-32B", "Qwen/Qwen3.5-35B-A3B-Base"])
def test_suggested_host_memory_is_the_least_that_fits(name):
    done = run("--model", name, "--gpu", "h200", "--host-memory", "128GiB", "--json")
    size = int(json.loads(done.stdout)["changes"][0]["setting"].split()[1].removesuffix("GiB"))
    big, job = model(name), Job()
    assert choose(big, job, h200(size), THIS_VERSION).fits
    assert not choose(big, job, h200(size - 3), THIS_VERSION).fits


def test_14b_lies_on_the_host_and_the_card():
    """The arithmetic of the design: 165 GiB of state, 110 on the host and 55 on the H200."""
    done = run("--model", "Qwen/Qwen3-14B", "--gpu", "h200", "--host-memory", "128GiB", "--json")
    assert done.exit_code == 0
    plan = json.loads(done.stdout)["plan"]
    assert 55 * GIB < plan["state_on_devices_bytes"] < 90 * GIB


def test_spare_device_memory_takes_only_what_the_host_lacks():
    big, job = model("Qwen/Qwen3-14B"), Job(activations="recompute", async_save=False)
    need = footprint(big, job, h200(), LATER, activations="recompute", waves=1)
    assert 0 < need.spilled < 80 * GIB
    assert need.host_bytes <= 128 * GIB * 0.94
    roomy = footprint(big, job, h200(512), LATER, activations="recompute", waves=1)
    assert roomy.spilled == 0


def test_saves_beside_training_need_the_state_of_the_largest_unit():
    big = model("Qwen/Qwen3-8B")
    kinds = {
        on: {
            item.kind: item.num_bytes
            for item in footprint(
                big, Job(async_save=on), h200(512), LATER, activations="keep", waves=1
            ).host
        }
        for on in (True, False)
    }
    assert kinds[True]["saves"] == 12 * big.largest_unit
    assert "saves" not in kinds[False]


def test_vocabulary_of_a_recipe_is_its_tokenizers(tmp_path, tokenizer_dir, tokenizer):
    config = {"model_config": {"model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2,
              "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96},
              "tokenizer_name_or_path": str(tokenizer_dir)}  # fmt: skip
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(config))
    out = json.loads(run(str(path), "--gpu", "h200", "--json").stdout)
    sized = config["model_config"] | {"vocab_size": len(tokenizer)}
    path.write_text(json.dumps({"model_config": sized}))
    expected = json.loads(run(str(path), "--gpu", "h200", "--json").stdout)
    assert out["model"] == expected["model"]
    path.write_text(json.dumps(config | {"tokenizer_name_or_path": str(tmp_path / "later")}))
    done = run(str(path), "--gpu", "h200")
    assert done.exit_code == 0
    assert "vocab_size is taken to be 32,768" in done.stderr
    path.write_text(json.dumps({"model_config": config["model_config"]}))
    assert "no tokenizer is named" in str(run(str(path), "--gpu", "h200").exception)
    (tmp_path / "tokenizer.json").write_text("[]")
    path.write_text(json.dumps(config | {"tokenizer_name_or_path": str(tmp_path)}))
    refused = run(str(path), "--gpu", "h200").exception
    assert isinstance(refused, ConfigError)
    assert "is not a tokenizer" in str(refused)


def test_small_card_recomputes_or_shortens_before_it_gives_up():
    card = describe_machine(
        gpu="rtx-4090", num_gpus=1, host_bytes=Rate(value=128.0 * GIB, origin="given")
    )
    choice = choose(model("Qwen/Qwen3-4B"), Job(), card, THIS_VERSION)
    assert choice.fits
    assert choice.activations == "recompute"
    long = predict(find_model("Qwen/Qwen3-4B"), Job(max_length=32768, micro_batch=4), card)
    assert not long.fits
    assert long.changes[0].setting == "per_device_train_batch_size: 1"


def test_waves_trade_activations_for_accumulators():
    small, job = model("Qwen/Qwen3-0.6B"), Job(tokens_per_step=65536)
    whole = footprint(small, job, h200(), THIS_VERSION, activations="keep", waves=1)
    split = footprint(small, job, h200(), THIS_VERSION, activations="keep", waves=4)

    def kind(need, name):
        return next(i.num_bytes for i in need.device if i.kind == name)

    assert kind(split, "kept activations") * 4 == kind(whole, "kept activations")
    assert kind(split, "gradients") == 4 * small.num_parameters > kind(whole, "gradients")


def test_kept_activations_of_the_measured_case():
    """16k tokens of 8B kept without the policy took 82 GiB on the H200."""
    job, plain = Job(tokens_per_step=16384), replace(THIS_VERSION, selective_keep=False)
    need = footprint(model("Qwen/Qwen3-8B"), job, h200(), plain, activations="keep", waves=1)
    # That run kept embedding and head out of the windows and had no float32 gradients of them.
    assert need.device_bytes / GIB == pytest.approx(82 + 12, rel=0.1)


def test_selective_policy_keeps_what_was_measured():
    """86 kB a token and layer at 8B, 137 without the policy."""
    layer = model("Qwen/Qwen3-8B").layers[0]
    assert 2 * layer.kept_elements == 86_016


def test_speed_of_the_measured_case():
    """8B, 32k tokens, no clipping: 11,650 tokens/s measured on the H200."""
    job = Job(clipping="off")
    speed = predict_speed(model("Qwen/Qwen3-8B"), job, h200(), activations="keep", waves=1)
    assert speed.tokens_per_second == pytest.approx(11_650, rel=0.1)
    assert speed.binding == "compute"


@pytest.mark.parametrize(("tokens", "slower"), [(32768, 0.32), (65536, 0.02)])
def test_deferred_update_costs_what_forward_does_not_cover(tokens, slower):
    name, machine = "Qwen/Qwen3-8B", h200()
    job = Job(tokens_per_step=tokens)
    times = [
        predict_speed(
            model(name), replace(job, clipping=c), machine, activations="keep", waves=1
        ).step_seconds
        for c in ("deferred", "off")
    ]
    assert times[0] / times[1] - 1 == pytest.approx(slower, abs=0.05)


def test_clipping_mode_that_the_plan_assumes():
    """Optimistic clipping hides the update under backward; a CPU defers it."""
    small, job = model("Qwen/Qwen3-8B"), Job()
    speeds = {
        mode: predict_speed(
            small, replace(job, clipping=mode), h200(), activations="keep", waves=1
        ).step_seconds
        for mode in ("auto", "deferred", "optimistic", "off")
    }
    assert speeds["auto"] == speeds["optimistic"] == speeds["off"] < speeds["deferred"]
    host = Rate(value=64.0 * GIB, origin="given")
    cpu = describe_cpu(host_bytes=host, disk_bytes=None, cores=2, update_gparams=None)
    assert predict_speed(small, job, cpu, activations="keep", waves=1).update_under == "forward"


@pytest.mark.parametrize(
    ("model_type", "left_out"),
    # The last matrix of 36 layers; none where a norm reads what it gives.
    [("qwen3", 36 * 4096 * 12288), ("olmo2", 0)],
)
def test_recompute_costs_one_forward_more_but_for_what_it_leaves_out(model_type, left_out):
    config, machine = find_model("Qwen/Qwen3-8B").config, h200()
    small = read_architecture({**config, "model_type": model_type})
    job = Job(tokens_per_step=131072)
    kept, again = (
        predict_speed(small, job, machine, activations=mode, waves=1)
        for mode in ("keep", "recompute")
    )
    whole = compute_seconds(small, 4096, 131072, machine.matmul_tflops.value)
    saved = 131072 * matmul_seconds(small, 2.0 * left_out, machine.matmul_tflops.value)
    assert again.step_seconds - kept.step_seconds == pytest.approx(whole / 3 - saved)


def test_host_traffic_of_a_card_does_not_grow_with_cards():
    small = model("Qwen/Qwen3-8B")
    job = Job(tokens_per_step=8 * 32768, clipping="deferred")
    one = predict_speed(
        small, replace(job, tokens_per_step=32768), h200(), activations="keep", waves=1
    )
    eight = predict_speed(small, job, h200(gpus=8), activations="keep", waves=1)
    assert eight.forward["h2d"] == pytest.approx(one.forward["h2d"] / 8)
    assert eight.forward["update"] == one.forward["update"]


def test_hours_and_money():
    done = run(
        *("--model", "Qwen/Qwen3-8B", "--gpu", "h200", "--gpus", "2", "--tokens", "1B"),
        *("--price", "3.5", "--json"),
    )
    out = json.loads(done.stdout)
    rate = out["plan"]["speed"]["tokens_per_second"]
    assert out["hours"] == pytest.approx(1e9 / rate / 3600)
    assert out["cost"] == pytest.approx(out["hours"] * 2 * 3.5)


def test_totals_are_the_sums_of_their_kinds():
    out = predict(find_model("Qwen/Qwen3-8B"), Job(), h200()).to_dict()["plan"]
    for place in ("host", "device", "disk"):
        assert out[f"{place}_bytes"] == sum(item["bytes"] for item in out[place])


def test_too_little_disk_for_checkpoints_is_said():
    done = run("--model", "Qwen/Qwen3-8B", "--gpu", "h200", "--disk", "100GB")
    assert done.exit_code == 3
    assert "too little disk" in done.stdout


def test_yaml_gives_model_and_batch(tmp_path):
    path = tmp_path / "axolotl.yaml"
    path.write_text(
        "base_model: Qwen/Qwen3-8B\nsequence_len: 2048\nmicro_batch_size: 2\n"
        "gradient_accumulation_steps: 4\n"
    )
    done = run(str(path), "--gpu", "h200", "--json")
    job = json.loads(done.stdout)["job"]
    assert (job["max_length"], job["micro_batch"], job["tokens_per_step"]) == (2048, 2, 16384)
    assert job["accumulation"] == 4


def test_adapters_need_two_bytes_a_parameter_of_their_model(tmp_path):
    path = tmp_path / "lora.yaml"
    path.write_text("base_model: Qwen/Qwen3-8B\nadapter: lora\nlora_r: 16\n")
    out = json.loads(run(str(path), "--gpu", "h200", "--json").stdout)
    host = {item["kind"]: item["bytes"] for item in out["plan"]["host"]}
    assert host["frozen weights"] == 2 * out["model"]["num_parameters"]
    adapters = host["master weights"] // 4
    assert adapters == 43_646_976  # 36 layers of 16 x 75,776 inputs and outputs
    assert host["optimizer state"] == 8 * adapters
    assert host["returned gradients"] == 2 * adapters
    fsdp = {item["kind"]: item["bytes"] for item in out["fsdp"]["card"]}
    assert fsdp["weights"] == 2 * (out["model"]["num_parameters"] + adapters)
    assert fsdp["gradients"] == out["fsdp"]["unsharded_gradient_bytes"] == 2 * adapters
    assert fsdp["optimizer state"] == 12 * adapters
    whole = json.loads(run("--model", "Qwen/Qwen3-8B", "--gpu", "h200", "--json").stdout)
    assert out["plan"]["speed"]["backward"]["d2h"] < whole["plan"]["speed"]["backward"]["d2h"] / 100


def test_yaml_with_the_models_configuration_inside(tmp_path):
    path = tmp_path / "scratch.yaml"
    config = find_model("Qwen/Qwen3-0.6B").config
    path.write_text(json.dumps({"model_config": config, "max_length": 512, "max_steps": 10}))
    out = json.loads(run(str(path), "--gpu", "h200", "--json").stdout)
    assert out["model"]["num_parameters"] == 596_049_920
    assert out["job"]["num_tokens"] == 10 * 8 * 512


def test_folder_with_a_config(tmp_path):
    config = find_model("Qwen/Qwen3-0.6B").config
    (tmp_path / "config.json").write_text(json.dumps(config))
    out = json.loads(run("--model", str(tmp_path), "--gpu", "h200", "--json").stdout)
    assert out["model"]["num_parameters"] == 596_049_920
    assert out["arithmetic"]["by_name"] is None or str(tmp_path)[-1].isdigit()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "h200"], "no model is named"),
        (["--model", "nobody/nothing", "--gpu", "h200"], "neither a model folder nor"),
        (["--model", "Qwen/Qwen3-8B", "--gpu", "h201"], "nearest: h200"),
        (["--model", "Qwen/Qwen3-8B", "--gpu", "h200", "--moments", "fp4"], "--moments is 'fp4'"),
        (["--model", "Qwen/Qwen3-8B", "--gpu", "h200", "--host-memory", "big"], "size in bytes"),
        (["--gpu", "h200", "--host-memory", "64"], "--host-memory: 64 has no unit"),
        (["--gpu", "h200", "--disk", "2"], "--disk: 2 has no unit"),
    ],
)
def test_wrong_argument_is_refused_with_a_remedy(arguments, message):
    done = run(*arguments)
    assert isinstance(done.exception, ConfigError)
    assert message in str(done.exception)


@pytest.mark.parametrize("content", ["{", "[]", "\udcff"])
def test_broken_config_file_is_refused(tmp_path, content):
    path = tmp_path / "config.json"
    path.write_text(content, errors="surrogateescape")
    with pytest.raises(ConfigError, match=str(path)):
        find_model(str(path))


def test_every_card_of_the_table_can_be_planned_with():
    for name in card_names():
        machine = describe_machine(gpu=name, num_gpus=1, host_bytes=None)
        assert machine.matmul_tflops.value <= machine.peak_tflops.value
        assert usable_device(machine) > 20 * GIB


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA H100", "h100"),
        ("RTX 4090", "rtx-4090"),
        ("geforce_rtx_4090", "rtx-4090"),
    ],
)
def test_card_is_found_by_the_name_its_driver_or_its_maker_gives_it(reported, name):
    assert find_card(reported)[0] == name


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("NVIDIA H100 NVL", "h100"), ("NVIDIA GeForce RTX 4090 Laptop GPU", "rtx-4090")],
)
def test_another_card_of_a_family_is_not_taken_for_it(name, nearest):
    with pytest.raises(ConfigError, match=rf"nearest: {nearest}\)"):
        find_card(name)


def test_memory_limit_of_this_process_counts(monkeypatch):
    arguments = ("--model", "Qwen/Qwen3-0.6B", "--json")
    monkeypatch.setenv("HEADRACE_HOST_MEMORY", "64GiB")
    roomy = json.loads(run(*arguments).stdout)
    assert roomy["machine"]["host_memory_bytes"] == {"value": 64 * GIB, "origin": "detected"}
    monkeypatch.setenv("HEADRACE_HOST_MEMORY", "4GiB")
    assert run(*arguments).exit_code == 3


def test_plan_of_settings_that_this_version_lacks_says_so():
    plan = predict(find_model("Qwen/Qwen3-8B"), Job(moments="8bit"), h200())
    assert plan.fits
    assert any("8bit moments are not in this version" in note for note in plan.notes)


def test_engine_settings_that_a_plan_names_exist():
    known = {f.name: f.default for f in fields(EngineConfig)}
    job = Job()
    for name in ("weight_slots", "gradient_slots", "loss_chunk_tokens"):
        assert known[name] == getattr(job, name)
    assert {"activations", "micro_batches_per_wave", "clipping"} <= set(known)
    # When the engine learns these, Features must say so.
    assert ("moments" in known) == (len(THIS_VERSION.moments) > 1)


def test_plan_answers_in_two_seconds_without_torch():
    code = (
        "import sys\nfrom headrace.cli import main\n"
        "try: main(['plan', '--model', 'Qwen/Qwen3-8B', '--gpu', 'h200', '--json'])\n"
        "finally: assert not {'torch', 'transformers', 'numpy'} & set(sys.modules), 'imported'\n"
    )
    # Processor time: other work on the machine does not count.
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_length: auto", "max_length: Input should be a valid integer"),
        ("gradient_accumulation_steps: [2]", "gradient_accumulation_steps: Input"),
        ("per_device_train_batch_size: 2.5", "per_device_train_batch_size: Input"),
        ("per_device_train_batch_size: true", "not true or false"),
        ("max_steps: -5", "max_steps is -5"),
        ("engine: fast", "engine: Input should be a dictionary"),
        ("max_lenght: 4096", "did you mean max_length?"),
        ("engine: {weight_slot: 3}", "did you mean weight_slots?"),
        ("adapter: qlora", "adapter: 'qlora' is refused"),
        ("max_length: 8\nmax_length: 9", "given twice"),
        ("run_name: 2021-13-45", "not YAML"),
        ("[" * 3000, "not YAML"),
    ],
)
def test_a_yaml_that_says_no_sizes_is_refused(tmp_path, text, message):
    path = tmp_path / "run.yaml"
    path.write_text("" if text.startswith("[") else "model_name_or_path: Qwen/Qwen3-8B\n")
    path.write_text(path.read_text() + text)
    done = run(str(path), "--gpu", "h100")
    assert isinstance(done.exception, ConfigError)
    assert message in str(done.exception)


@pytest.mark.parametrize("text", ["[" * 9000, "{", "[]", "\0"])
def test_a_damaged_model_configuration_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    done = run("--model", str(tmp_path), "--gpu", "h100")
    assert isinstance(done.exception, ConfigError)
    assert isinstance(run("--model", "a" * 300, "--gpu", "h100").exception, ConfigError)
