"""``headrace train`` on several ranks: the same rows, the same result, stop and resume anywhere."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ranked
import ranked_train
from headrace.parallel.ranks import Ranks
from headrace.store.checkpoint import read_record
from headrace.trainer import train
from headrace.trainer.metrics import read_rows

pytestmark = pytest.mark.multirank

RANKS = 2


@pytest.fixture
def configs(make_config, tmp_path):
    """A run of twelve rows a step, which every number of ranks keeps."""

    def make(name, num_ranks=1, **changes):
        return make_config(
            output_dir=str(tmp_path / name),
            per_device_train_batch_size=2,
            gradient_accumulation_steps=6 // num_ranks,
            max_steps=6,
            engine={"update_threads": 1},
            **changes,
        )

    return make


def weights(checkpoint):
    """Weights and optimizer planes of a checkpoint."""
    return load_file(f"{checkpoint}/model.safetensors") | load_file(
        f"{checkpoint}/optimizer.safetensors"
    )


def difference(a, b):
    """The largest difference of two checkpoints' tensors, as a share of the tensor's norm."""
    first, second = weights(a), weights(b)
    assert first.keys() == second.keys()
    return max(
        float((first[name].double() - second[name].double()).norm())
        / max(float(second[name].double().norm()), 1e-12)
        for name in first
    )


def read_rows_of(folder):
    return read_rows(Path(folder) / "metrics.jsonl")


def test_two_ranks_train_as_one(crews, configs, corpus):
    """Rows, losses, evaluations, weights and moments; files are the main rank's alone."""
    evaluation = {
        "eval_datasets": [{"path": str(corpus), "name": "seen"}],
        "eval_strategy": "steps",
        "eval_steps": 3,
        "save_strategy": "steps",
        "save_steps": 3,
    }
    alone = train(configs("alone", dtype="float32", **evaluation))
    many = crews(RANKS).run(
        ranked_train.run, config=configs("many", RANKS, dtype="float32", **evaluation)
    )
    assert [m["status"] for m in many] == ["finished"] * RANKS
    assert many[0]["num_tokens"] == many[1]["num_tokens"] == alone.num_tokens
    expected = read_rows_of(alone.output_dir)
    for found, row in zip(read_rows_of(many[0]["output_dir"]), expected, strict=True):
        assert found.keys() == row.keys()
        for key in ("step", "epoch", "num_tokens", "num_supervised_tokens", "learning_rate"):
            assert found.get(key) == row.get(key)
        for key in row.keys() & {"loss", "eval_loss", "grad_norm"}:
            assert found[key] == pytest.approx(row[key], rel=2e-5)
    assert difference(many[0]["checkpoint"], alone.checkpoint) < 2e-4
    states = [read_record(path)["trainer_state"] for path in map(path_of, (many[0], vars(alone)))]
    assert states[0]["loader"] == states[1]["loader"]
    record = json.loads((path_of(many[0]).parent / "run.json").read_text())
    assert record["num_ranks"] == RANKS


def path_of(result):
    return Path(result["checkpoint"])


def test_a_save_of_two_ranks_goes_on_with_one_three_and_two(crews, configs, tmp_path):
    """To rounding what the undisturbed run computes, and bit by bit on as many ranks."""
    plain = {"dtype": "float32"}
    whole = crews(RANKS).run(ranked_train.run, config=configs("whole", RANKS, **plain))[0]
    saving = plain | {"save_strategy": "steps", "save_steps": 3}
    crews(RANKS).run(ranked_train.run, config=configs("saved", RANKS, **saving))
    saved = tmp_path / "saved" / "checkpoint-3"
    for num_ranks in (1, 2, 3):
        folder = tmp_path / f"on{num_ranks}"
        shutil.copytree(saved, folder / "checkpoint-3")
        config = configs(folder.name, num_ranks, resume_from_checkpoint="auto", **plain)
        if num_ranks == 1:
            checkpoint = train(config).checkpoint
        else:
            checkpoint = path_of(crews(num_ranks).run(ranked_train.run, config=config)[0])
        limit = 0 if num_ranks == RANKS else 2e-4
        assert difference(checkpoint, whole["checkpoint"]) <= limit


EXPERTS = {
    "model_type": "qwen3_moe", "hidden_size": 32, "intermediate_size": 64,
    "moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 128, "initializer_range": 0.1,
}  # fmt: skip


def test_balanced_experts_on_two_ranks(crews, configs):
    """The balancing loss is one a micro-batch, so ranks change nothing; loads are of all ranks."""
    keys = {"model_config": EXPERTS, "router_aux_loss_coef": 0.5, "dtype": "float32"}
    alone = train(configs("alone", **keys))
    many = crews(RANKS).run(ranked_train.run, config=configs("many", RANKS, **keys))[0]
    found, expected = map(read_rows_of, (many["output_dir"], alone.output_dir))
    for name in ("loss", "auxiliary_loss"):
        assert [row[name] for row in found] == pytest.approx(
            [row[name] for row in expected], rel=2e-5
        )
    # A token's choice may turn on the last bit after some steps.
    assert found[0]["busiest_expert"] == expected[0]["busiest_expert"]
    assert difference(many["checkpoint"], alone.checkpoint) < 1e-3


def test_slices_of_experts_on_two_ranks(crews, configs, tmp_path):
    """The bits of whole layers; a save goes on with other slices, with none, on any ranks."""
    keys = {"model_config": EXPERTS, "dtype": "float32", "max_grad_norm": 0}

    def sliced(name, num_ranks, slices, **more):
        engine = {"update_threads": 1, "expert_slices": slices}
        return configs(name, num_ranks, **keys, **more) | {"engine": engine}

    whole = crews(RANKS).run(ranked_train.run, config=configs("whole", RANKS, **keys))[0]
    saving = {"save_strategy": "steps", "save_steps": 3}
    found = crews(RANKS).run(ranked_train.run, config=sliced("run", RANKS, 3, **saving))[0]
    assert difference(found["checkpoint"], whole["checkpoint"]) == 0
    saved = tmp_path / "run" / "checkpoint-3"
    for num_ranks, slices in ((2, 4), (2, 1), (3, 2), (1, 3)):
        folder = tmp_path / f"on{num_ranks}in{slices}"
        shutil.copytree(saved, folder / "checkpoint-3")
        config = sliced(folder.name, num_ranks, slices, resume_from_checkpoint="auto")
        if num_ranks == 1:
            checkpoint = train(config).checkpoint
        else:
            checkpoint = path_of(crews(num_ranks).run(ranked_train.run, config=config)[0])
        assert difference(checkpoint, whole["checkpoint"]) <= (0 if num_ranks == RANKS else 2e-4)


def test_adapters_with_dropout_on_two_ranks(crews, configs, tmp_path):
    """Frozen weights are shared out, too; rows drop the same elements wherever they are."""
    base = train(configs("base", dtype="float32") | {"max_steps": 1}).checkpoint
    keys = {"model_config": None, "model_name_or_path": str(base), "dtype": "float32",
            "adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_dropout": 0.2,
            "lora_modules_to_save": ["input_layernorm"]}  # fmt: skip
    alone = train(configs("alone", **keys))
    many = crews(RANKS).run(ranked_train.run, config=configs("many", RANKS, **keys))[0]
    found, expected = map(read_rows_of, (many["output_dir"], alone.output_dir))
    assert [row["loss"] for row in found] == pytest.approx(
        [row["loss"] for row in expected], rel=2e-5
    )
    trained = [load_file(f"{path}/adapter_model.safetensors")
               for path in (many["checkpoint"], alone.checkpoint)]  # fmt: skip
    assert trained[0].keys() == trained[1].keys()
    for name, value in trained[0].items():
        assert torch.allclose(value, trained[1][name], atol=2e-4), name
    # Going on, on one rank, from what two have saved.
    shutil.rmtree(tmp_path / "alone")
    shutil.copytree(many["checkpoint"], tmp_path / "alone" / "checkpoint-6")
    config = configs("alone", resume_from_checkpoint="auto", **keys) | {"max_steps": 7}
    assert train(config).step == 7


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_number_of_ranks_loads_the_same_bits(crews, configs, dtype):
    """And what two ranks wrote is what they hold: planes of a state, joined over ranks."""
    config = configs("run", RANKS, dtype=dtype)
    path = path_of(crews(RANKS).run(ranked_train.run, config=config)[0])
    planes = ranked.joined([ranked.loaded(Ranks(), path=path, dtype=dtype)])
    assert planes["layers.0", "exp_avg"].abs().sum() > 0
    for num_ranks in (2, 3):
        shards = crews(num_ranks).run(ranked.loaded, path=path, dtype=dtype)
        found = ranked.joined(shards)
        assert all(torch.equal(found[key], plane) for key, plane in planes.items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_slices_hold_the_bits_that_whole_layers_do(crews, configs, dtype):
    config = configs("run", RANKS, dtype=dtype, model_config=EXPERTS)
    config["engine"] |= {"expert_slices": 2}
    path = path_of(crews(RANKS).run(ranked_train.run, config=config)[0])
    planes = ranked.joined([ranked.loaded(Ranks(), path=path, dtype=dtype)])
    assert planes["layers.0", "exp_avg"].abs().sum() > 0
    for num_ranks, slices in ((2, 3), (3, 4)):
        shards = crews(num_ranks).run(ranked.loaded, path=path, dtype=dtype, slices=slices)
        found = ranked.joined(shards)
        assert all(torch.equal(found[key], plane) for key, plane in planes.items())


def test_a_signal_on_one_rank_stops_all_at_the_same_step(crews, configs):
    """All return the same code; going on gives what the undisturbed run gives, bit by bit."""
    whole = crews(RANKS).run(ranked_train.run, config=configs("whole", RANKS))[0]
    stopped = crews(RANKS).run(ranked_train.run, config=configs("run", RANKS), stop_at=2)
    assert [(s["status"], s["step"], s["exit_code"]) for s in stopped] == [
        ("stopped", 2, 143)
    ] * RANKS
    config = configs("run", RANKS, resume_from_checkpoint="auto")
    on = crews(RANKS).run(ranked_train.run, config=config)[0]
    assert difference(on["checkpoint"], whole["checkpoint"]) == 0


@pytest.mark.parametrize("async_save", [True, False])
def test_a_slow_disk_of_the_main_rank_ends_no_wait(crews, configs, async_save):
    """A save takes longer than a step may wait for another rank (torchtune#2093)."""
    keys = {"save_strategy": "steps", "save_steps": 2, "async_save": async_save}
    config = configs("run", RANKS, **keys) | {"max_steps": 3}
    config["engine"] |= {"lane_timeout_seconds": 1.0}
    ended = crews(RANKS).run(ranked_train.run, config=config, seconds_a_save=2.5)
    assert [e["status"] for e in ended] == ["finished"] * RANKS


def test_a_damaged_checkpoint_is_set_aside_once(crews, configs, tmp_path):
    """All ranks read the damage, the main one renames, and all go on from the one before."""
    keys = {"save_strategy": "steps", "save_steps": 2}
    crews(RANKS).run(ranked_train.run, config=configs("run", RANKS, **keys) | {"max_steps": 4})
    file = tmp_path / "run" / "checkpoint-4" / "optimizer.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    config = configs("run", RANKS, resume_from_checkpoint="auto", **keys)
    ended = crews(RANKS).run(ranked_train.run, config=config)
    assert [e["step"] for e in ended] == [6] * RANKS
    names = sorted(path.name for path in (tmp_path / "run").glob("checkpoint-*"))
    assert names == ["checkpoint-2", "checkpoint-4", "checkpoint-4.damaged", "checkpoint-6"]


def test_callbacks_of_the_main_rank_decide_for_all(crews, configs, tmp_path):
    """A watchdog that sees the main rank's rows ends every rank; streamed rows are shared out."""
    stream = {"loss_watchdog_threshold": 0.1, "loss_watchdog_patience": 2}
    config = configs("run", RANKS, **stream)
    config["datasets"] = [dict(config["datasets"][0], streaming=True)]
    ended = crews(RANKS).run(ranked_train.run, config=config)
    assert [(e["status"], e["step"]) for e in ended] == [("stopped", 2)] * RANKS
    alone = train(configs("alone", **stream) | {"datasets": config["datasets"]})
    assert ended[0]["num_tokens"] == alone.num_tokens
    rows, expected = map(read_rows_of, (ended[0]["output_dir"], alone.output_dir))
    assert rows[0]["loss"] == pytest.approx(expected[0]["loss"], rel=2e-5)


def test_a_save_that_a_row_leads_to_is_of_all_ranks(crews, configs, tmp_path):
    """Only the main rank's callback sees the row; a save needs what every rank holds."""
    config = configs("run", RANKS)
    ended = crews(RANKS).run(ranked_train.run, config=config, save_at=2, stop_at=3)
    assert [(e["status"], e["step"]) for e in ended] == [("stopped", 3)] * RANKS
    names = sorted(path.name for path in (tmp_path / "run").glob("checkpoint-*"))
    assert names == ["checkpoint-2", "checkpoint-3"]
