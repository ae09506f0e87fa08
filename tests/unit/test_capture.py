"""What layers are called with is what transformers calls them with; templates share what agrees."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from headrace.models.capture import CallCapture
from headrace.models.compiling import Compiler
from headrace.models.spec import ModelSpec
from headrace.models.templates import Templates
from tiny import make_batch, masters, reference_model, tiny_config, tiny_state

CPU = torch.device("cpu")
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 5000.0},
    "linear": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}


def embedding_of(state):
    return {"embed_tokens.weight": masters(state)["model.embed_tokens.weight"].requires_grad_()}


def recorded_calls(model, **inputs):
    """Arguments of every decoder layer in transformers' own forward."""
    calls = []
    handles = [
        layer.register_forward_pre_hook(
            lambda module, args, kwargs: calls.append((args[0], kwargs)), with_kwargs=True
        )
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model(use_cache=False, **inputs)
    for handle in handles:
        handle.remove()
    return calls


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_rotary_buffers_garbage_after_meta_device_loading(family, rope):
    """Pitfall 19. Every buffer, built for a model on the meta device, has a fresh model's bits."""
    config = tiny_config(family, rope_parameters=ROPES[rope])
    spec, _ = tiny_state(config)
    capture = CallCapture(spec, CPU)
    fresh = dict(AutoModelForCausalLM.from_config(config).model.named_buffers())
    found = dict(capture._base.named_buffers())
    assert found.keys() == fresh.keys()
    for name, buffer in found.items():
        assert buffer.dtype == torch.float32, name
        assert buffer.device == CPU
        assert torch.equal(buffer, fresh[name]), name


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_arguments_are_those_of_transformers(family, rope):
    config = tiny_config(family, rope_parameters=ROPES[rope])
    spec, state = tiny_state(config)
    model = reference_model(spec, state, attention="headrace")
    batch = make_batch(torch.randint(0, 96, (2, 10)))
    calls = recorded_calls(model, input_ids=batch.input_ids_BT, position_ids=batch.position_ids_BT)
    hidden, arguments = CallCapture(spec, CPU)(
        embedding_of(state), batch.input_ids_BT, batch.position_ids_BT, None
    )
    assert len(arguments) == len(calls) == 3
    assert torch.equal(hidden, calls[0][0])
    for found, (_, wanted) in zip(arguments, calls, strict=True):
        assert found.keys() == wanted.keys()
        for key, value in found.items():
            if key == "position_embeddings":
                assert all(torch.equal(a, b) for a, b in zip(value, wanted[key], strict=True))
            elif isinstance(value, torch.Tensor):
                assert torch.equal(value, wanted[key]), key
            else:
                assert value == wanted[key], key
        assert found["attention_mask"] is None


def test_document_boundaries_reach_every_layer():
    spec, state = tiny_state(tiny_config("qwen2"))
    batch = make_batch(torch.randint(0, 96, (2, 10)), cuts=(4,))
    _, arguments = CallCapture(spec, CPU)(
        embedding_of(state), batch.input_ids_BT, batch.position_ids_BT, batch.cu_seqlens
    )
    for found in arguments:
        assert found["cu_seq_lens_q"].unique().tolist() == batch.cu_seqlens.tolist()
        assert found["max_length_q"] == 10
        assert found["attention_mask"] is None


def test_positions_restart_with_every_document():
    """Rotary tables follow the positions that were given."""
    spec, state = tiny_state(tiny_config("llama"))
    batch = make_batch(torch.randint(0, 96, (1, 10)), cuts=(4,))
    _, arguments = CallCapture(spec, CPU)(
        embedding_of(state), batch.input_ids_BT, batch.position_ids_BT, batch.cu_seqlens
    )
    cos, sin = arguments[0]["position_embeddings"]
    assert torch.equal(cos[0, :4], cos[0, 4:8])
    assert torch.equal(sin[0, :4], sin[0, 4:8])
    assert not torch.equal(sin[0, 4:8], sin[0, 5:9])


def test_gradients_reach_the_embedding():
    spec, state = tiny_state(tiny_config())
    embedding = embedding_of(state)
    ids = torch.tensor([[5, 7, 5]])
    hidden, _ = CallCapture(spec, CPU)(embedding, ids, torch.arange(3)[None], None)
    (gradient,) = torch.autograd.grad(hidden.sum(), list(embedding.values()))
    rows = gradient.sum(1)
    assert rows[5] == 2 * 32
    assert rows[7] == 32
    assert rows.sum() == 3 * 32


def test_capturing_leaves_the_spec_as_it_is():
    """Stubs and identities live in a shallow twin of the base model."""
    spec, state = tiny_state(tiny_config())
    names = [name for name, _ in spec.model.named_modules()]
    capture = CallCapture(spec, CPU)
    capture(embedding_of(state), torch.tensor([[1, 2]]), torch.arange(2)[None], None)
    assert [name for name, _ in spec.model.named_modules()] == names
    assert all(p.device.type == "meta" for p in spec.model.parameters())


def test_repeated_calls_start_anew():
    spec, state = tiny_state(tiny_config())
    capture = CallCapture(spec, CPU)
    arguments = embedding_of(state), torch.tensor([[1, 2]]), torch.arange(2)[None], None
    first = capture(*arguments)[1]
    assert len(capture(*arguments)[1]) == len(first) == 3


# -- templates -----------------------------------------------------------------------------


def test_layers_that_agree_share_a_template():
    spec = ModelSpec(tiny_config("llama", num_hidden_layers=4))
    assert Templates(spec, compiler=None).num_structures == 1


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_sliding_and_full_layers_never_share_one(family):
    """Pitfall 23. One graph for both would lose the window, or give every layer one."""
    config = tiny_config(
        family, num_hidden_layers=4, use_sliding_window=True, sliding_window=5, max_window_layers=2
    )
    templates = Templates(ModelSpec(config), compiler=None)
    assert templates.num_structures == 2
    windows = [t.module.self_attn.sliding_window for t in templates._templates]
    assert windows == [None, None, 5, 5]


def test_every_structure_has_code_of_its_own():
    """The compiler's recompile limit counts per code object."""
    config = tiny_config("qwen2", num_hidden_layers=4, max_window_layers=2)
    templates = Templates(ModelSpec(config), compiler=Compiler("eager"))
    functions = {id(call): call for t in templates._templates for call in t.calls}.values()
    codes = {call._compiled._torchdynamo_orig_callable.__code__ for call in functions}
    assert len(functions) == 6  # two structures; kept, recomputed and plain
    assert len(codes) == 6
