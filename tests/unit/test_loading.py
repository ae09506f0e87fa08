"""Filling a state from safetensors and by initialisation."""

import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from headrace.errors import CheckpointError, DataError
from headrace.models.spec import ModelSpec
from headrace.store.loading import initialise, load_pretrained
from headrace.store.state import ModelState
from tiny import half_away, masters, planes, reference_model, tiny_config, tiny_state

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def empty(config, dtype="float32"):
    spec = ModelSpec(config)
    return spec, ModelState(spec.units, dtype)


def saved_model(folder, *, tied=False, dtype=torch.float32, family="qwen3", **kwargs):
    """A folder that transformers wrote, and the weights in it."""
    config = tiny_config(family, tied=tied)
    spec, state = tiny_state(config)
    model = reference_model(spec, state).to(dtype)
    model.save_pretrained(folder, **kwargs)
    return config, {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("file_dtype", list(DTYPES))
@pytest.mark.parametrize("tied", [True, False])
def test_folder_of_transformers(tmp_path, tied, file_dtype, state_dtype):
    """Every float type of the file becomes the exact master weight."""
    config, wanted = saved_model(tmp_path, tied=tied, dtype=DTYPES[file_dtype])
    spec, state = empty(config, state_dtype)
    report = load_pretrained(spec, state, tmp_path)
    found = masters(state)
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name].float())] == []
    assert report.ignored == ()
    for unit in state.units:
        assert not unit.exp_avg.any()
        assert not unit.exp_avg_sq.any()


def test_working_weights_of_a_float32_checkpoint_round_half_away(tmp_path):
    config, wanted = saved_model(tmp_path)
    spec, state = empty(config, "bfloat16")
    load_pretrained(spec, state, str(tmp_path))
    for unit in state.units:
        for param in unit.layout.params:
            working = unit.weights[param.slice].view(param.shape).float()
            assert torch.equal(working, half_away(wanted[param.name]))


def test_sharded_folder(tmp_path):
    config, wanted = saved_model(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    spec, state = empty(config)
    load_pretrained(spec, state, tmp_path)
    found = masters(state)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_index_left_from_an_older_save(tmp_path):
    """Pitfall 18. A folder that was saved to again as one file: that file counts, as for HF."""
    saved_model(tmp_path, family="llama", max_shard_size="20KB")
    index = (tmp_path / "model.safetensors.index.json").read_text()
    shards = {path.name: path.read_bytes() for path in tmp_path.glob("model-*")}
    config, wanted = saved_model(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(index)
    for name, data in shards.items():
        (tmp_path / name).write_bytes(data)
    spec, state = empty(config)
    load_pretrained(spec, state, tmp_path)
    found = masters(state)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert all(torch.equal(p, found[name]) for name, p in loaded.named_parameters())


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": []}', "{}"])
def test_index_that_is_none(tmp_path, text):
    saved_model(tmp_path, max_shard_size="20KB")
    (tmp_path / "model.safetensors.index.json").write_text(text)
    spec, state = empty(tiny_config())
    with pytest.raises(CheckpointError, match="is not an index"):
        load_pretrained(spec, state, tmp_path)


def test_index_that_names_the_wrong_file(tmp_path):
    config, _ = saved_model(tmp_path, max_shard_size="20KB")
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    names = index["weight_map"]
    head = names["lm_head.weight"]
    other = next(file for file in names.values() if file != head)
    names["lm_head.weight"] = other
    path.write_text(json.dumps(index))
    spec, state = empty(config)
    with pytest.raises(CheckpointError, match=other):
        load_pretrained(spec, state, tmp_path)


def test_checkpoint_of_the_base_model_alone(tmp_path):
    """Tied models are often published without head and without the ``model.`` prefix."""
    config = tiny_config(tied=True)
    spec, source = tiny_state(config)
    reference_model(spec, source).model.save_pretrained(tmp_path)
    spec, state = empty(config)
    load_pretrained(spec, state, tmp_path)
    assert all(torch.equal(value, masters(source)[name]) for name, value in masters(state).items())


def rewritten(folder, change):
    """Apply ``change`` to the tensors of a folder's only file."""
    from safetensors.torch import load_file  # noqa: PLC0415 - one user

    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_tied_model_saved_under_the_head(tmp_path):
    config, wanted = saved_model(tmp_path, tied=True)
    rewritten(tmp_path, lambda t: t.update({"lm_head.weight": t.pop("model.embed_tokens.weight")}))
    spec, state = empty(config)
    assert load_pretrained(spec, state, tmp_path).ignored == ()
    name = "model.embed_tokens.weight"
    assert torch.equal(masters(state)[name], wanted[name])


def test_tied_model_saved_twice(tmp_path):
    """Both copies are fine while they agree; another head would be dropped silently."""
    config, wanted = saved_model(tmp_path, tied=True)
    embedding = wanted["model.embed_tokens.weight"]
    rewritten(tmp_path, lambda t: t.update({"lm_head.weight": embedding.clone()}))
    spec, state = empty(config)
    assert load_pretrained(spec, state, tmp_path).ignored == ()
    rewritten(tmp_path, lambda t: t.update({"lm_head.weight": embedding + 1}))
    with pytest.raises(DataError, match="holds another head"):
        load_pretrained(spec, state, tmp_path)


def test_tensors_without_a_place_are_reported(tmp_path):
    config, _ = saved_model(tmp_path)
    rewritten(tmp_path, lambda t: t.update({"mtp.weight": torch.ones(2), "a.b": torch.ones(1)}))
    spec, state = empty(config)
    assert load_pretrained(spec, state, tmp_path).ignored == ("a.b", "mtp.weight")


def test_tensors_of_layers_that_the_class_computes_without_are_told_apart(tmp_path):
    """Such as a bias that config.json does not switch on: the layer is not what was trained."""
    config, _ = saved_model(tmp_path)
    layer, bias = "model.layers.1.self_attn", torch.ones(2)
    extra = [
        f"{layer}.q_proj.bias", f"{layer}.rotary_emb.inv_freq", "model.layers.3.eh_proj.weight",
        "visual.layers.0.norm.bias",
    ]  # fmt: skip
    rewritten(tmp_path, lambda t: t.update({name: bias.clone() for name in extra}))
    report = load_pretrained(*empty(config), tmp_path)
    assert report.ignored == tuple(sorted(extra))
    assert report.unused == (extra[0],)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(tmp_path, value):
    config, _ = saved_model(tmp_path)
    name = "model.layers.1.mlp.up_proj.weight"
    rewritten(tmp_path, lambda t: t[name].view(-1).__setitem__(7, value))
    spec, state = empty(config, "bfloat16")
    with pytest.raises(DataError, match=rf"{name} has NaN or infinite"):
        load_pretrained(spec, state, tmp_path)


def test_missing_tensor(tmp_path):
    config, _ = saved_model(tmp_path)
    rewritten(tmp_path, lambda t: t.pop("model.layers.2.self_attn.q_norm.weight"))
    spec, state = empty(config)
    with pytest.raises(DataError, match=r"no tensor 'model\.layers\.2\.self_attn\.q_norm"):
        load_pretrained(spec, state, tmp_path)


def test_missing_head_of_an_untied_model(tmp_path):
    config, _ = saved_model(tmp_path)
    rewritten(tmp_path, lambda t: t.pop("lm_head.weight"))
    spec, state = empty(config)
    with pytest.raises(DataError, match=r"no tensor 'lm_head\.weight'"):
        load_pretrained(spec, state, tmp_path)


def test_wrong_shape(tmp_path):
    """Pitfall 20. A vocabulary of another size is refused, not resized."""
    saved_model(tmp_path)
    spec, state = empty(tiny_config(vocab_size=97))
    with pytest.raises(DataError, match=r"embed_tokens.weight has shape \(96, 32\), .* \(97, 32\)"):
        load_pretrained(spec, state, tmp_path)


def test_folder_without_safetensors(tmp_path):
    spec, state = empty(tiny_config())
    with pytest.raises(CheckpointError, match="no safetensors weights"):
        load_pretrained(spec, state, tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin, which is pickle"):
        load_pretrained(spec, state, tmp_path)


def test_index_of_files_that_are_not_there(tmp_path):
    config, _ = saved_model(tmp_path, max_shard_size="20KB")
    victim = sorted(tmp_path.glob("*.safetensors"))[1]
    victim.unlink()
    spec, state = empty(config)
    with pytest.raises(CheckpointError, match=victim.name):
        load_pretrained(spec, state, tmp_path)


def test_truncated_file(tmp_path):
    """A half-copied download is an error that names the file."""
    config, _ = saved_model(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    spec, state = empty(config)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load_pretrained(spec, state, tmp_path)


# -- initialisation ------------------------------------------------------------------------


def test_initialisation_is_hugging_faces():
    """Same means and standard deviations, parameter by parameter; ones and zeros exactly."""
    config = tiny_config("llama-bias", hidden_size=128, intermediate_size=192, vocab_size=512)
    _, state = tiny_state(config, perturb=False)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    reference = {name: p.detach() for name, p in model.named_parameters()}
    for name, value in masters(state).items():
        if value.ndim < 2:
            assert torch.equal(value, reference[name]), name
            assert bool((value == (0 if name.endswith("bias") else 1)).all())
        else:
            error = config.initializer_range / value.numel() ** 0.5
            assert abs(float(value.mean())) < 5 * error, name
            assert float(value.std()) == pytest.approx(float(reference[name].std()), rel=0.05)
            assert float(value.std()) == pytest.approx(config.initializer_range, rel=0.05)


def test_initialisation_keeps_the_padding_row_zero():
    config = tiny_config(pad_token_id=3)
    _, state = tiny_state(config)
    embedding = masters(state)["model.embed_tokens.weight"]
    assert not embedding[3].any()
    assert embedding[4].any()


def test_initialisation_repeats():
    for dtype in ("float32", "bfloat16"):
        _, first = tiny_state(tiny_config(), dtype, seed=5)
        _, again = tiny_state(tiny_config(), dtype, seed=5)
        _, other = tiny_state(tiny_config(), dtype, seed=6)
        same, differs = planes(again), planes(other)
        for name, plane in planes(first).items():
            assert torch.equal(plane, same[name])
            assert torch.equal(plane, differs[name]) == (
                name.endswith(("exp_avg", "exp_avg_sq", "step"))
            )


def test_initialisation_of_both_dtypes_is_the_same():
    _, exact = tiny_state(tiny_config(), "float32", perturb=False)
    _, split = tiny_state(tiny_config(), "bfloat16", perturb=False)
    wanted = masters(exact)
    assert all(torch.equal(value, wanted[name]) for name, value in masters(split).items())


def test_initialisation_of_a_unit_depends_on_no_other():
    """More layers or a larger vocabulary leave the other layers as they were."""
    _, state = tiny_state(tiny_config(), perturb=False)
    _, larger = tiny_state(tiny_config(num_hidden_layers=5, vocab_size=200), perturb=False)
    small, large = masters(state), masters(larger)
    layers = [name for name in small if ".layers." in name]
    assert len(layers) == 3 * 11
    assert all(torch.equal(small[name], large[name]) for name in layers)


def test_initialisation_draws_every_unit_anew():
    _, state = tiny_state(tiny_config(), perturb=False)
    weights = [masters(state)[f"model.layers.{i}.mlp.up_proj.weight"] for i in range(3)]
    assert not torch.equal(weights[0], weights[1])
    correlation = torch.corrcoef(torch.stack([w.flatten() for w in weights]))
    assert (correlation - torch.eye(3)).abs().max() < 0.15


def test_initialisation_leaves_the_global_generator():
    torch.manual_seed(1)
    wanted = torch.rand(3)
    torch.manual_seed(1)
    spec, state = empty(tiny_config())
    initialise(spec, state, seed=9)
    assert torch.equal(torch.rand(3), wanted)
