"""GGUF files load as transformers reads them."""

import numpy as np
import pytest
import torch

from headrace.errors import ConfigError, DataError
from headrace.models.spec import ModelSpec
from headrace.store.loading import load_pretrained
from headrace.store.state import ModelState
from tiny import masters, tiny_config, tiny_state

gguf = pytest.importorskip("gguf")

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def gguf_name(name):
    fixed = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in fixed:
        return fixed[name]
    layer, part = name.removeprefix("model.layers.").removesuffix(".weight").split(".", 1)
    return f"blk.{layer}.{NAMES[part]}.weight"


def interleave_halves(weight, num_heads):
    """The order of rows in which llama.cpp's rotary embedding wants queries and keys."""
    rows, columns = weight.shape
    halves = weight.reshape(num_heads, 2, rows // num_heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


def write_gguf(path, config, tensors, *, kind=None):
    """A llama model in GGUF; ``kind`` is the quantization of its matrices."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    for name, tensor in tensors.items():
        array = tensor.numpy()
        if "q_proj" in name:
            array = interleave_halves(array, config.num_attention_heads)
        if "k_proj" in name:
            array = interleave_halves(array, config.num_key_value_heads)
        array = np.ascontiguousarray(array)
        if kind is not None and tensor.ndim == 2:
            writer.add_tensor(gguf_name(name), gguf.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name), array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def config():
    # Rows of whole blocks of 32, which the 8-bit format wants.
    return tiny_config("llama", tied=False, intermediate_size=64, num_hidden_layers=2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_float32_gguf_gives_every_bit(tmp_path, config, dtype):
    _, source = tiny_state(config)
    wanted = masters(source)
    write_gguf(tmp_path / "tiny.gguf", config, wanted)
    for path, file in ((tmp_path / "tiny.gguf", None), (tmp_path, "tiny.gguf")):
        spec = ModelSpec(config)
        state = ModelState(spec.units, dtype)
        load_pretrained(spec, state, path, gguf_file=file)
        found = masters(state)
        assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


def test_quantized_gguf_is_dequantized(tmp_path, config):
    _, source = tiny_state(config)
    wanted = masters(source)
    write_gguf(tmp_path / "q8.gguf", config, wanted, kind=gguf.GGMLQuantizationType.Q8_0)
    spec = ModelSpec(config)
    state = ModelState(spec.units, "float32")
    load_pretrained(spec, state, tmp_path / "q8.gguf")
    for name, value in masters(state).items():
        # A block of 32 shares a scale of its largest value / 127.
        assert (value - wanted[name]).abs().max() <= wanted[name].abs().max() / 127


def test_missing_gguf_file(tmp_path, config):
    spec = ModelSpec(config)
    state = ModelState(spec.units, "float32")
    with pytest.raises(ConfigError, match=r"no GGUF file .*absent\.gguf"):
        load_pretrained(spec, state, tmp_path / "absent.gguf")


def test_gguf_of_a_smaller_model(tmp_path, config):
    _, source = tiny_state(config)
    write_gguf(tmp_path / "small.gguf", config, masters(source))
    spec = ModelSpec(tiny_config("llama", intermediate_size=64, num_hidden_layers=3))
    state = ModelState(spec.units, "float32")
    with pytest.raises(DataError, match=r"small\.gguf has no tensor 'model\.layers\.2\."):
        load_pretrained(spec, state, tmp_path / "small.gguf")
