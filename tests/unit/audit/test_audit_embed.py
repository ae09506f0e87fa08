"""Vectors depend on prompt, weights and stack, never on batch, padding side or interruption."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from headrace.audit.embed import EmbedConfig, embed_panel, embed_prompts, pool
from headrace.audit.prompts import TEMPLATES, render_prompts
from headrace.audit.sources import load, source_from_file
from headrace.audit.stack import describe_stack, hash_weights, hf_forward, untrained_model
from headrace.audit.vector_cache import VectorCache, write_vectors
from headrace.cli._embedders import plain_embedder
from headrace.errors import ConfigError, DataError

CONFIG = LlamaConfig(
    vocab_size=200, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=256,
)  # fmt: skip
PROMPTS = ["a", "abc abc", "return 0.1234\nvolume 5", "abc", "date 2020-01-01 up"]


@pytest.fixture(scope="module")
def tokenizer():
    characters = sorted(set("".join(chr(c) for c in range(32, 127)) + "\n"))
    vocabulary = {c: k for k, c in enumerate(characters)} | {"<unk>": len(characters)}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>")


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG)


def embed(model, tokenizer, prompts=PROMPTS, layer=-1, **config):
    settings = EmbedConfig(layer=layer, **config)
    forward = hf_forward(model, layer=layer)
    return embed_prompts(prompts, tokenizer=tokenizer, forward=forward, config=settings)


def test_a_vector_does_not_depend_on_its_batch(model, tokenizer):
    together = embed(model, tokenizer, batch_size=5)
    alone = np.concatenate([embed(model, tokenizer, [prompt]) for prompt in PROMPTS])
    np.testing.assert_allclose(together, alone, atol=1e-6)
    reversed_ = embed(model, tokenizer, PROMPTS[::-1], batch_size=2)[::-1]
    np.testing.assert_allclose(together, reversed_, atol=1e-6)


def test_vectors_are_the_model_s_own_last_hidden_state(model, tokenizer):
    ids = torch.tensor([tokenizer(PROMPTS[2])["input_ids"]])
    with torch.no_grad():
        hidden = model(ids, output_hidden_states=True).hidden_states
    for layer in (-1, 1, 0):
        got = embed(model, tokenizer, [PROMPTS[2]], layer=layer)[0]
        np.testing.assert_allclose(got, hidden[layer][0, -1].numpy(), atol=1e-6)


@pytest.mark.parametrize("pooling", ["last_token", "mean"])
def test_pooling_is_right_for_either_padding_side(pooling):
    """The published code takes position (tokens - 1): right only where padding is on the right."""
    torch.manual_seed(1)
    real = torch.randn(1, 3, 4)
    padding = torch.full((1, 2, 4), 1e6)
    right = pool(torch.cat([real, padding], 1), torch.tensor([[1, 1, 1, 0, 0]]), pooling)
    left = pool(torch.cat([padding, real], 1), torch.tensor([[0, 0, 1, 1, 1]]), pooling)
    torch.testing.assert_close(left, right)
    expected = real[:, -1] if pooling == "last_token" else real.mean(dim=1)
    torch.testing.assert_close(right, expected)
    published = torch.cat([padding, real], 1)[0, 3 - 1]
    assert not torch.equal(published, real[0, -1])


def test_a_killed_run_goes_on_where_it_stopped(model, tokenizer, tmp_path):
    parts = {"weights": hash_weights(model), "template": "t/1"}
    calls = []
    inner = hf_forward(model)

    def forward(ids, lengths):
        calls.append(len(lengths))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return inner(ids, lengths)

    config = EmbedConfig(batch_size=2)
    cache = VectorCache(tmp_path, parts)
    with pytest.raises(KeyboardInterrupt):
        embed_prompts(PROMPTS, tokenizer=tokenizer, forward=forward, config=config, cache=cache)
    cache.flush()
    calls.clear()
    again = embed_prompts(
        PROMPTS,
        tokenizer=tokenizer,
        forward=forward,
        config=config,
        cache=VectorCache(tmp_path, parts),
    )
    assert calls == [1], "four of five prompts were kept"
    np.testing.assert_allclose(again, embed(model, tokenizer), atol=1e-6)


def test_cached_vectors_are_found_under_their_own_key_only(model, tokenizer, tmp_path):
    def run(**parts):
        counted = []
        inner = hf_forward(model)

        def forward(ids, lengths):
            counted.append(len(lengths))
            return inner(ids, lengths)

        embed_prompts(
            PROMPTS, tokenizer=tokenizer, forward=forward, config=EmbedConfig(),
            cache=VectorCache(tmp_path, {"weights": "w", "stack.torch": "2.5"} | parts),
        )  # fmt: skip
        return sum(counted)

    assert run() == 5
    assert run() == 0
    assert run(weights="other") == 5
    assert run(**{"stack.torch": "2.10"}) == 5


def test_a_cache_that_is_not_ours_is_refused(tmp_path):
    cache = VectorCache(tmp_path, {"weights": "w"})
    cache.folder.mkdir()
    (cache.folder / "part-x.parquet").write_text("x")
    with pytest.raises(DataError, match="delete it"):
        cache.load()


def test_weights_hash_sees_one_changed_bit(model):
    before = hash_weights(model)
    with torch.no_grad():
        parameter = model.model.norm.weight
        parameter[0] = torch.nextafter(parameter[0], torch.tensor(2.0))
    changed = hash_weights(model)
    with torch.no_grad():
        parameter[0] = 1.0
    assert before != changed
    assert hash_weights(model) == before


def test_twins_differ_by_seed_and_leave_the_generator_alone():
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    one, again, other = (untrained_model(CONFIG, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(before, torch.random.get_rng_state())
    assert hash_weights(one) == hash_weights(again) != hash_weights(other)


def test_files_carry_their_stack_to_the_audit(model, tokenizer, small_panel, tmp_path):
    panel = small_panel()
    stack = describe_stack(device="cpu", dtype="float32", attention="sdpa", runner="transformers")
    source = embed_panel(
        panel, tokenizer=tokenizer, forward=hf_forward(model), weights=hash_weights(model),
        stack=stack, cache_dir=tmp_path / "cache",
    )  # fmt: skip
    assert source.template == "panel/1"
    key = {
        "weights": source.weights, "template": source.template, "pooling": source.pooling,
        "layer": source.layer, "stack": source.stack, "source": "tiny",
    }  # fmt: skip
    write_vectors(tmp_path / "v.parquet", source.values, key)
    read = source_from_file(tmp_path / "v.parquet")
    values, record = load("m", read, panel)
    np.testing.assert_array_equal(values, source.values)
    assert read.fingerprint == source.fingerprint
    assert record.weights == source.weights
    (tmp_path / "other.parquet").write_text("x")
    with pytest.raises(DataError, match="not written by headrace embed"):
        source_from_file(tmp_path / "other.parquet")


def test_prompts_hold_what_was_known_and_ablations_leave_it_out(small_panel):
    panel = small_panel(features=np.arange(24.0)[:, None], feature_names=["size"])
    whole = render_prompts(panel, "panel/1")
    assert whole[7] == "Entity: E1\nDate: 2020-01-02\nsize: 7\nOutlook:"
    assert "2020" not in "".join(render_prompts(panel, "panel-no-date/1"))
    assert "E1" not in "".join(render_prompts(panel, "panel-no-entity/1"))
    assert all(str(y)[:8] not in "".join(whole) for y in np.abs(panel.y))
    texts = small_panel(prompts=[f"text {k}" for k in range(24)])
    assert render_prompts(texts, "text/1")[3] == "text 3"
    for name in ("text/1", "vessl-2026/1", "unheard/1"):
        with pytest.raises(ConfigError):
            render_prompts(panel, name)
    assert all("/" in name for name in TEMPLATES)


@pytest.mark.parametrize(
    ("prompts", "config", "words"),
    [(["abc", ""], {}, "prompt 1 has no token"), (["abc" * 9], {"max_length": 5}, "longer than 5")],
)
def test_prompts_that_cannot_be_embedded_are_refused(model, tokenizer, prompts, config, words):
    with pytest.raises(DataError, match=words):
        embed(model, tokenizer, prompts, **config)


def test_a_vector_that_is_not_finite_is_refused_with_its_prompt(model, tokenizer):
    with pytest.raises(DataError, match="prompt 0 is not finite"):
        embed_prompts(
            ["abc"], tokenizer=tokenizer, config=EmbedConfig(),
            forward=lambda ids, _: torch.full((*ids.shape, 4), float("nan")),
        )  # fmt: skip
    with pytest.raises(ConfigError, match="pooling"):
        EmbedConfig(pooling="first")


# peft asks transformers by a name that is on its way out.
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
def test_an_adapter_folder_is_embedded_with_its_adapter(tokenizer, tmp_path):
    """LoRA against full weight: an adapter that is not applied would have its base's vectors."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    base = LlamaForCausalLM(CONFIG)
    base.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    lora.base_model_name_or_path = str(tmp_path / "base")
    adapted = peft.get_peft_model(LlamaForCausalLM.from_pretrained(tmp_path / "base"), lora)
    adapted.save_pretrained(tmp_path / "lora")
    tokenizer.save_pretrained(tmp_path / "lora")
    config = EmbedConfig()
    found = {}
    for name in ("base", "lora"):
        with plain_embedder(
            str(tmp_path / name), layer=-1, device="cpu", dtype="float32", attention="sdpa",
            untrained=None,
        ) as embedder:  # fmt: skip
            vectors = embed_prompts(
                PROMPTS, tokenizer=embedder.tokenizer, forward=embedder.forward, config=config
            )
            found[name] = embedder.weights, vectors
    assert found["base"][0] != found["lora"][0]
    assert np.abs(found["base"][1] - found["lora"][1]).max() > 1e-3
    ids = torch.tensor([tokenizer(PROMPTS[0])["input_ids"]])
    with torch.no_grad():
        hidden = adapted.merge_and_unload().model(ids).last_hidden_state[0, -1]
    np.testing.assert_allclose(found["lora"][1][0], hidden, atol=1e-5)


@pytest.mark.parametrize("name", [".", "empty", "missing/folder"])
def test_a_folder_without_a_model_is_refused_without_asking_a_hub(tmp_path, monkeypatch, name):
    def asked(*_args, **_kwargs):
        raise AssertionError("asked a hub")

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", asked)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="holds neither config"):
        plain_embedder(
            str(tmp_path / name), layer=-1, device="cpu", dtype="float32", attention="eager",
            untrained=None,
        )  # fmt: skip
