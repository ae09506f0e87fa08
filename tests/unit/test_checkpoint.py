"""Checkpoints and exports: every bit there and back, and readable by transformers."""

import json

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from headrace.errors import CheckpointError, ConfigError
from headrace.models.spec import ModelSpec
from headrace.store import checkpoint
from headrace.store.checkpoint import (
    export_pretrained,
    find_problem,
    latest_checkpoint,
    load_checkpoint,
    read_record,
)
from headrace.store.loading import load_pretrained
from headrace.store.safetensors_io import read_index
from headrace.store.state import ModelState
from saved import TRAINER_STATE, fresh, save, trained
from tiny import (
    differing,
    make_batches,
    make_engine,
    masters,
    planes,
    reference_model,
    tiny_config,
    tiny_state,
    train,
)


@pytest.fixture(scope="module")
def saved():
    """One trained state that tests save but do not change."""
    return trained()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False])
def test_every_bit_of_every_plane(tmp_path, tied, dtype):
    config = tiny_config("llama-bias", tied=tied)
    spec, state = trained(config, dtype)
    assert all(plane.any() for plane in planes(state).values())
    path = save(tmp_path / "run", spec, state, 2)
    assert path == tmp_path / "run" / "checkpoint-2"
    spec, again = fresh(config, dtype)
    assert load_checkpoint(path, spec, again) == TRAINER_STATE
    assert differing(planes(again), planes(state)) == []
    assert again.optimizer_step == state.optimizer_step == 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_resumed_training_is_undisturbed_training(tmp_path, dtype):
    config = tiny_config(tied=True)
    losses, undisturbed = train(config, steps=6, dtype=dtype, weight_decay=0.0)
    spec, state = tiny_state(config, dtype)
    found = []
    for start in (0, 2, 4):  # three processes, each resuming from the last one's checkpoint
        if start:
            spec, state = fresh(config, dtype)
            load_checkpoint(latest_checkpoint(tmp_path), spec, state)
        with make_engine(spec, state) as engine:
            for seed in (start, start + 1):
                result = engine.step(
                    make_batches(3, seed=seed), learning_rate=1e-3, max_grad_norm=0.5
                )
                found.append(result.loss)
            engine.synchronize()
        save(tmp_path, spec, state, start + 2)
    assert found == losses
    assert differing(planes(state), undisturbed) == []


def test_frozen_parameters(tmp_path):
    config = tiny_config(tied=True)
    spec, state = tiny_state(config, "bfloat16", trainable=lambda name: "mlp" in name)
    path = save(tmp_path, spec, state, 1)
    spec = ModelSpec(config, trainable=lambda name: "mlp" in name)
    again = ModelState(spec.units, "bfloat16")
    load_checkpoint(path, spec, again)
    assert differing(planes(again), planes(state)) == []
    spec, other = fresh(config)
    with pytest.raises(CheckpointError, match=r"lacks .*exp_avg"):
        load_checkpoint(path, spec, other)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["qwen3", "llama", "mistral", "qwen2"])
def test_transformers_loads_a_checkpoint_as_it_is(tmp_path, family, tied, dtype):
    """Equal weights, bit for bit, and equal hidden states to rounding (sums in another order)."""
    spec, state = trained(tiny_config(family, tied=tied), dtype, steps=1)
    path = save(tmp_path, spec, state, 1)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    loaded = dict(model.named_parameters())
    for unit in state.units:
        for param in unit.layout.params:
            working = unit.weights[param.slice].view(param.shape).float()
            assert torch.equal(loaded[param.name], working)
    assert AutoConfig.from_pretrained(path).dtype == getattr(torch, dtype)
    ids = torch.randint(0, 96, (2, 11), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        output = model(ids, output_hidden_states=True)
    with make_engine(spec, state) as engine:
        for layer, wanted in enumerate(output.hidden_states):
            hidden = engine.hidden_states(ids, layer=layer)
            assert (hidden - wanted).abs().max() < 1e-5
        logits = hidden @ model.lm_head.weight.T
    assert (logits - output.logits).abs().max() < 1e-5


def test_export(tmp_path, saved, tokenizer):
    spec, state = saved
    folder = export_pretrained(spec, state, tmp_path / "out" / "model", tokenizer)
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
    assert not [name for name in names if "optimizer" in name or name == checkpoint.RECORD]
    assert list((tmp_path / "out").iterdir()) == [folder]
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    assert AutoTokenizer.from_pretrained(folder).eos_token == tokenizer.eos_token
    # It loads back as working weights without remainder.
    spec, again = fresh()
    load_pretrained(spec, again, folder)
    for unit, other in zip(state.units, again.units, strict=True):
        assert torch.equal(unit.weights.view(torch.int16), other.weights.view(torch.int16))


def test_export_overwrites_nothing(tmp_path, saved):
    spec, state = saved
    (tmp_path / "empty").mkdir()
    export_pretrained(spec, state, tmp_path / "empty")
    with pytest.raises(ConfigError, match="exists and is not empty"):
        export_pretrained(spec, state, tmp_path / "empty")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="exists and is not empty"):
        export_pretrained(spec, state, tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_tied_weights_saved_twice(tmp_path):
    """Pitfall 17. One storage, one key, after save → load → train → save; HF ties them again."""
    config = tiny_config(tied=True)
    spec, state = trained(config)
    first = save(tmp_path / "a", spec, state, 1)
    spec, state = fresh(config)
    load_checkpoint(first, spec, state)
    with make_engine(spec, state) as engine:
        engine.step(make_batches(1, seed=9), learning_rate=1e-2, max_grad_norm=1.0)
        engine.synchronize()
    second = save(tmp_path / "b", spec, state, 2)
    for path in (first, second):
        with safe_open(path / "model.safetensors", framework="pt") as file:
            keys = list(file.keys())
        assert "model.embed_tokens.weight" in keys
        assert "lm_head.weight" not in keys
        assert len(keys) == len(set(spec.parameter_names()))
        model = AutoModelForCausalLM.from_pretrained(path)
        assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
        assert AutoConfig.from_pretrained(path).tie_word_embeddings
    assert state.state_bytes == 12 * spec.num_parameters
    assert spec.num_parameters == model.num_parameters()


def assert_index_is_what_is_there(folder, stem, expected):
    index = folder / f"{stem}.safetensors.index.json"
    files = sorted(path.name for path in folder.glob(f"{stem}*.safetensors"))
    if index.exists():
        weight_map = json.loads(index.read_text())["weight_map"]
        assert len(files) > 1
        assert sorted(set(weight_map.values())) == files
        assert set(weight_map) == expected
    else:
        assert files == [f"{stem}.safetensors"]
    keys = []
    for name in files:
        with safe_open(folder / name, framework="pt") as file:
            here = list(file.keys())
        keys += here
        if index.exists():
            assert all(weight_map[key] == name for key in here)
    assert len(keys) == len(set(keys))
    assert set(keys) == expected


def test_index_and_shards_disagree(tmp_path, saved, monkeypatch):
    """Pitfall 18. Re-saved with fewer shards: keys = index = files, for weights and moments."""
    spec, state = saved
    names = set(spec.parameter_names())
    moments = {f"{n}.{kind}" for n in names for kind in ("exp_avg", "exp_avg_sq", "remainder")}
    counts = []
    for shard_bytes in (4_000, 30_000, 1 << 30):
        monkeypatch.setattr(checkpoint, "SHARD_BYTES", shard_bytes)
        path = save(tmp_path / "run", spec, state, 3)
        export = export_pretrained(spec, state, tmp_path / f"export-{shard_bytes}")
        for folder in (path, export):
            assert_index_is_what_is_there(folder, "model", names)
        assert_index_is_what_is_there(path, "optimizer", moments)
        counts.append(len(list(path.glob("*.safetensors"))))
        _, again = fresh()
        load_checkpoint(path, spec, again)
        assert differing(planes(again), planes(state)) == []
        AutoModelForCausalLM.from_pretrained(path)
    assert counts[0] > counts[1] > counts[2] == 2


def test_rotary_buffers_after_meta_device_loading(tmp_path, saved):
    """Pitfall 19. Nothing but parameters is saved; HF's buffers are those of a fresh model."""
    spec, state = saved
    path = save(tmp_path, spec, state, 1)
    assert set(read_index(path)) == set(spec.parameter_names())
    loaded = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    built = reference_model(spec, state)
    for (name, buffer), (_, wanted) in zip(
        loaded.named_buffers(), built.named_buffers(), strict=True
    ):
        assert torch.equal(buffer, wanted), name


def test_embedding_resized_to_the_tokenizer(tmp_path, tokenizer):
    """Pitfall 20. A vocabulary padded beyond the tokenizer keeps its size and its rows."""
    padded = len(tokenizer) + 37
    config = tiny_config(tied=True, vocab_size=padded)
    spec, state = trained(config)
    path = save(tmp_path / "run", spec, state, 1, tokenizer=tokenizer)
    export = export_pretrained(spec, state, tmp_path / "export", tokenizer)
    for folder in (path, export):
        assert AutoConfig.from_pretrained(folder).vocab_size == padded
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert model.get_input_embeddings().weight.shape == (padded, 32)
        assert len(AutoTokenizer.from_pretrained(folder)) == len(tokenizer)
        reloaded = ModelSpec.from_pretrained(str(folder))
        again = ModelState(reloaded.units, "bfloat16")
        load_pretrained(reloaded, again, folder)
        assert torch.equal(again.units[0].weights, state.units[0].weights)


def test_tokenizer_with_several_chat_templates(tmp_path, saved, tokenizer):
    """They are saved in a folder of their own inside the checkpoint."""
    spec, state = saved
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "tools: {{ messages }}"}
    path = save(tmp_path, spec, state, 1, tokenizer=tokenizer)
    assert find_problem(path) is None
    assert AutoTokenizer.from_pretrained(path).chat_template == tokenizer.chat_template
    assert any("/" in name for name in read_record(path)["files"])


def test_replaced_checkpoint(tmp_path, saved):
    """A second save of a step replaces the first."""
    spec, state = trained(steps=1)
    save(tmp_path, spec, state, 5)
    path = save(tmp_path, *saved, 5)
    spec, again = fresh()
    load_checkpoint(path, spec, again)
    assert differing(planes(again), planes(saved[1])) == []
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-5"]


def test_saving_only_reads(tmp_path, saved):
    before = planes(saved[1])
    wanted = masters(saved[1])
    save(tmp_path, *saved, 1)
    assert differing(planes(saved[1]), before) == []
    assert all(torch.equal(value, wanted[name]) for name, value in masters(saved[1]).items())
