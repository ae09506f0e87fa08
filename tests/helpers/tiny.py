"""Tiny models, batches and references for the tests of store, models and engine.

Shape legend: B rows, T positions.
"""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional as F  # noqa: N812 - its name everywhere
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from headrace.batch import IGNORE_INDEX, MicroBatch
from headrace.engine import AdamWConfig, Engine, EngineConfig
from headrace.models.spec import ModelSpec
from headrace.store.loading import initialise
from headrace.store.state import ModelState

VOCAB = 96
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
}
EXPERT_SIZES = {name: size for name, size in SIZES.items() if name != "initializer_range"} | {
    "moe_intermediate_size": 24,
    "num_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
FAMILIES = {
    "qwen3": lambda **k: Qwen3Config(head_dim=16, **k),
    "llama": LlamaConfig,
    "llama-bias": lambda **k: LlamaConfig(attention_bias=True, mlp_bias=True, **k),
    "mistral": lambda **k: MistralConfig(**{"sliding_window": 5} | k),
    "qwen2": lambda **k: Qwen2Config(
        **{"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1} | k
    ),
}


def tiny_config(family="qwen3", *, tied=False, **overrides):
    """A model of some 30 thousand parameters; its weights are large enough to matter."""
    return FAMILIES[family](**SIZES | {"tie_word_embeddings": tied} | overrides)


def tiny_state(config, dtype="float32", *, seed=0, perturb=True, trainable=None):
    """Spec and initialised state; norms and biases are moved off their ones and zeros."""
    spec = ModelSpec(config, trainable=trainable)
    state = ModelState(spec.units, dtype)
    initialise(spec, state, seed=seed)
    if perturb:
        generator = torch.Generator().manual_seed(seed + 1)
        for unit, param in parameters(state):
            if len(param.shape) < 2:
                noise = 0.2 * torch.randn(param.shape, generator=generator)
                unit.set_master(param, unit.master(param) + noise)
    return spec, state


def parameters(state):
    """Every parameter with its unit."""
    return [(unit, param) for unit in state.units for param in unit.layout.params]


def masters(state):
    """Master weights by name."""
    return {param.name: unit.master(param) for unit, param in parameters(state)}


def distances(found, wanted):
    """Relative distance of each tensor by name, but of those that are zero."""
    return {
        name: float((found[name] - wanted[name]).norm() / wanted[name].norm())
        for name in wanted
        if wanted[name].norm() > 0
    }


def planes(state):
    """A copy of every plane as bits, so that comparing is bitwise."""
    copies = {"optimizer_step": torch.tensor(state.optimizer_step)}
    for unit in state.units:
        kinds = {"weights": unit.weights, "exp_avg": unit.exp_avg, "exp_avg_sq": unit.exp_avg_sq}
        if unit.remainder is not None:
            kinds["remainder"] = unit.remainder
        for kind, plane in kinds.items():
            bits = torch.int16 if plane.element_size() == 2 else torch.int32
            copies[f"{unit.layout.name}.{kind}"] = plane.view(bits).clone()
    return copies


def differing(a, b):
    """Names whose bits differ."""
    assert a.keys() == b.keys()
    return [name for name in a if not torch.equal(a[name], b[name])]


def returned_gradients(engine):
    """The gradients of the last step as they came back to the host, float32, by name."""
    engine.updater.gradient_norm()  # waits for them
    return {
        param.name: engine.updater.returned_gradient(unit)[param.slice]
        .float()
        .view(param.shape)
        .clone()
        for unit, layout in enumerate(engine.state.layouts)
        for param in layout.params
        if param.trainable
    }


def document_ends(num_rows, length, cuts):
    """``cu_seqlens`` when every row is cut at the same positions."""
    ends = [row * length + cut for row in range(num_rows) for cut in (0, *cuts)]
    return torch.tensor([*ends, num_rows * length], dtype=torch.int32)


def make_batch(ids_BT, *, cuts=(), unsupervised=()):
    """A micro-batch that predicts each next token inside its document.

    Args:
        ids_BT: token ids.
        cuts: positions at which a new document starts, the same in every row.
        unsupervised: slices of positions without target.
    """
    B, T = ids_BT.shape
    targets_BT = torch.roll(ids_BT, -1, 1)
    positions_T = torch.arange(T)
    for cut in cuts:
        positions_T[cut:] = torch.arange(T - cut)
        targets_BT[:, cut - 1] = IGNORE_INDEX
    targets_BT[:, -1] = IGNORE_INDEX
    for positions in unsupervised:
        targets_BT[:, positions] = IGNORE_INDEX
    return MicroBatch(
        input_ids_BT=ids_BT,
        targets_BT=targets_BT,
        position_ids_BT=positions_T.expand(B, T).clone(),
        cu_seqlens=document_ends(B, T, cuts) if cuts else None,
    )


def make_batches(num, *, rows=2, length=14, seed=0, cuts=(), vocab=VOCAB):
    """Micro-batches of random tokens; the first is half unsupervised, so that counts differ."""
    generator = torch.Generator().manual_seed(seed)
    return [
        make_batch(
            torch.randint(0, vocab, (rows, length), generator=generator),
            cuts=cuts,
            unsupervised=(slice(0, length // 2),) if number == 0 else (),
        )
        for number in range(num)
    ]


def num_supervised(batches):
    """Supervised tokens of the global batch."""
    return sum(batch.num_supervised_tokens for batch in batches)


def reference_model(spec, state, *, attention="eager", dtype=torch.float32):
    """Transformers' own model, on the CPU, with copies of the state's master weights."""
    model = AutoModelForCausalLM.from_config(
        spec.config, dtype=dtype, attn_implementation=attention
    )
    missing, unexpected = model.load_state_dict(masters(state), strict=False)
    assert not unexpected
    assert spec.tied or not missing
    model.tie_weights()
    return model


def _document_mask(batch, window):
    B, T = batch.input_ids_BT.shape
    document_N = torch.zeros(B * T, dtype=torch.long)
    document_N[batch.cu_seqlens[1:-1].long()] = 1
    document_BT = document_N.cumsum(0).view(B, T)
    distance = torch.arange(T)[:, None] - torch.arange(T)
    allowed = (distance >= 0) & (document_BT[:, :, None] == document_BT[:, None, :])
    if window is not None:
        allowed &= distance < window
    return torch.where(allowed, 0.0, torch.finfo(torch.float32).min)[:, None]


def reference_logits(model, batch):
    """Logits of transformers' eager attention; packed documents get an explicit dense mask."""
    config, mask = model.config, None
    if batch.cu_seqlens is not None:
        window = getattr(config, "sliding_window", None)
        mask = _document_mask(batch, window)
        if hasattr(config, "layer_types"):  # these models look their masks up by layer type
            full = _document_mask(batch, None)
            mask = {"full_attention": full, "sliding_attention": mask}
    return model(
        input_ids=batch.input_ids_BT,
        position_ids=batch.position_ids_BT,
        attention_mask=mask,
        use_cache=False,
    ).logits


def reference_backward(model, batches):
    """Accumulate the gradient of the mean loss over the global batch; returns that loss."""
    total = 0.0
    for batch in batches:
        loss = F.cross_entropy(
            reference_logits(model, batch).flatten(0, 1),
            batch.targets_BT.flatten(),
            reduction="sum",
            ignore_index=IGNORE_INDEX,
        )
        loss = loss / num_supervised(batches)
        loss.backward()
        total += loss.item()
    return total


def make_engine(spec, state, *, optimizer=None, **settings):
    """An engine with one update thread, so that tiny tests start none of their own."""
    settings = {"update_threads": 1} | settings
    return Engine(spec, state, "cpu", EngineConfig(**settings), optimizer or AdamWConfig())


def train(
    config,
    *,
    steps,
    dtype="float32",
    max_grad_norm=0.5,
    learning_rate=1e-3,
    num_batches=3,
    cuts=(),
    weight_decay=0.1,
    **settings,
):
    """Train a fresh tiny model; returns losses and the bits of the final state."""
    spec, state = tiny_state(config, dtype)
    optimizer = AdamWConfig(weight_decay=weight_decay)
    with make_engine(spec, state, optimizer=optimizer, **settings) as engine:
        results = [
            engine.step(
                make_batches(num_batches, seed=step, cuts=cuts),
                learning_rate=learning_rate,
                max_grad_norm=max_grad_norm,
            )
            for step in range(steps)
        ]
        engine.synchronize()
    return [result.loss for result in results], planes(state)


def relative_error(value, reference):
    """Norm of the difference over the norm of the reference."""
    scale = torch.linalg.vector_norm(reference.double())
    return float(torch.linalg.vector_norm(value.double() - reference.double()) / scale)


def half_away(values):
    """float32 rounded to bfloat16, half away from zero, as float32: the plane that compute uses."""
    bits = values.contiguous().numpy().view(np.uint32)
    rounded = (bits + np.uint32(0x8000)) & np.uint32(0xFFFF0000)
    return torch.from_numpy(rounded.view(np.float32).copy())
