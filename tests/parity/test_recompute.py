"""What recompute leaves out: products that no gradient reads, and nothing else.

Three ways to tell must agree: what follows back from the gradients, NaN in place of the product,
and the compiler's own graphs.
"""

import shutil

import pytest
import torch
from torch._dynamo import register_backend
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from transformers import AutoConfig

from families import family_config
from headrace.models.capture import CallCapture
from headrace.models.compiling import Compiler
from headrace.models.left_out import left_out, num_left_out
from headrace.models.lora import LoraSettings
from headrace.models.spec import ModelSpec
from headrace.models.templates import Templates
from headrace.selftest.checks import streamed_gradients
from headrace.selftest.twin import filled_state, make_batches, tiny_config

pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),
]
ADAPTED = LoraSettings(rank=3, alpha=5.0, dropout=0.3, target_modules=("down_proj", "q_proj"))
DOWN = ("mlp.down_proj.weight",)
BOTH = ("self_attn.o_proj.weight", *DOWN)
LAST = {  # of a layer's matrices, those that only its sum reads
    "Qwen3": DOWN,
    "Llama 3.1": DOWN,
    "Mistral": DOWN,
    "Phi-3": DOWN,
    "OLMo": DOWN,
    "SmolLM3": DOWN,
    "Granite": DOWN,  # times a constant
    "GLM-4 (9B)": DOWN,
    "Gemma": DOWN,
    "Qwen3.5": DOWN,
    "stablelm": DOWN,
    "stablelm, parallel": BOTH,
    "cohere": BOTH,
    "gpt_neox": ("attention.dense.weight", "mlp.dense_4h_to_h.weight"),
    "starcoder2": ("mlp.c_proj.weight",),
    "OLMo 2": (),  # a norm reads it
    "OLMo 3": (),
    "Gemma 2": (),
    "Gemma 3": (),
    "GLM-4-0414": (),
}
NOT_IN_THE_TABLE = {
    "stablelm": {"use_parallel_residual": False},
    "stablelm, parallel": {"use_parallel_residual": True},
    "cohere": {},
    "gpt_neox": {},
    "starcoder2": {"residual_dropout": 0.0, "embedding_dropout": 0.0},
}
PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)
counted = []


def counting(graph, _inputs):
    nodes = graph.graph.nodes
    counted.append(sum(n.op == "call_function" and n.target in PRODUCTS for n in nodes))
    return make_boxed_func(graph.forward)


register_backend(
    aot_autograd(
        fw_compiler=counting,
        bw_compiler=counting,
        inference_compiler=counting,
        partition_fn=min_cut_rematerialization_partition,
    ),
    name="test_counted_products",
)


def twin(family, **options):
    if family in NOT_IN_THE_TABLE:
        config = AutoConfig.for_model(family.split(",")[0], **NOT_IN_THE_TABLE[family])
    else:
        config = family_config(family)
    return ModelSpec.from_config(tiny_config(ModelSpec.from_config(config)), **options)


@pytest.fixture
def whole(monkeypatch):
    """Call it, and from then on recompute leaves nothing out."""
    return lambda: monkeypatch.setattr(Templates, "leaves_out", False)


@pytest.mark.parametrize("family", LAST)
def test_the_products_that_only_the_sum_at_the_end_reads(family):
    spec = twin(family)
    assert {left_out(spec, index) for index in range(spec.num_layers)} == {LAST[family]}


def recomputed(spec, state, batches, backend):
    """Loss and gradients of a compiled step that recomputes every layer."""
    return streamed_gradients(
        spec, state, batches, activations="recompute", compile=True, compile_backend=backend
    )


class Layer:
    """The last layer of a twin with real weights, and its gradients."""

    def __init__(self, spec, backend=None):
        self.index = spec.num_layers - 1
        self.module = spec.layer(self.index)
        state = filled_state(spec)
        parameters = [
            {p.local_name: unit.master(p).clone() for p in unit.layout.params}
            for unit in (state.units[0], state.units[1 + self.index])
        ]
        state.close()
        (batch,) = make_batches(1, vocab_size=spec.vocab_size)
        with torch.no_grad():
            self.hidden_BTD, arguments = CallCapture(spec, torch.device("cpu"))(
                parameters[0], batch.input_ids_BT, batch.position_ids_BT, None
            )
        self.arguments = arguments[self.index]
        trainable = {p.local_name: p.trainable for p in spec.units[1 + self.index].params}
        self.parameters = {n: p.requires_grad_(trainable[n]) for n, p in parameters[1].items()}
        self.compiler = None if backend is None else Compiler(backend)
        self.templates = Templates(spec, compiler=self.compiler)

    def gradients(self, *, again=False, seeds_B=None):
        hidden_BTD = self.hidden_BTD.clone().requires_grad_()
        output_BTD = self.templates.run(
            self.index, self.parameters, hidden_BTD, self.arguments,
            keep=False, again=again, seeds_B=seeds_B,
        ).hidden_BTD  # fmt: skip
        trained = [p for p in self.parameters.values() if p.requires_grad]
        return torch.autograd.grad(output_BTD, [hidden_BTD, *trained], torch.ones_like(output_BTD))


@pytest.mark.parametrize("family", [f for f in LAST if f not in ("Gemma 3", "OLMo 3")])
def test_nan_in_their_place_reaches_no_gradient(family):
    """And reaches some where a norm follows: the last matrix then is not left out."""
    spec = twin(family)
    layer = Layer(spec)
    wanted = layer.gradients()
    templates = layer.templates._templates[layer.index].module
    hooks = [
        templates.get_submodule(name.removesuffix(".weight")).register_forward_hook(
            lambda _module, _args, output: output + float("nan")
        )
        for name in LAST[family] or DOWN
    ]
    found = layer.gradients()
    for hook in hooks:
        hook.remove()
    assert all(g.isfinite().all() for g in wanted)
    equal = [torch.equal(a, b) for a, b in zip(found, wanted, strict=True)]
    assert all(equal) == bool(LAST[family])


@pytest.mark.parametrize("family", ["stablelm, parallel", "OLMo 2"])
def test_the_compiler_leaves_out_the_same_and_gradients_keep_their_bits(family):
    layer = Layer(twin(family), "test_counted_products")
    counted.clear()
    found, products = layer.gradients(again=True), sum(counted)
    counted.clear()
    wanted = layer.gradients()
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert sum(counted) - products == len(LAST[family])


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_a_real_compiler_keeps_the_bits_too():
    from torch._inductor import config  # noqa: PLC0415 - slow, here alone

    layer = Layer(twin("Qwen3"), "inductor")
    with config.patch(compile_threads=1):
        found, wanted = layer.gradients(again=True), layer.gradients()
    assert layer.compiler.counts.row() == {"graphs": 2, "recompilations": 0, "eager_calls": 0}
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_steps_keep_their_bits(whole):
    """With sums of weight gradients, several micro-batches and poisoned slots; no graph more."""
    spec = twin("Qwen3")
    state, batches = filled_state(spec), make_batches(2, vocab_size=spec.vocab_size)
    counted.clear()
    loss, found = recomputed(spec, state, batches, "test_counted_products")
    graphs, products = len(counted), sum(counted)
    whole()
    counted.clear()
    whole_loss, wanted = recomputed(spec, state, batches, "test_counted_products")
    state.close()
    assert loss == whole_loss
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
    assert (len(counted), sum(counted)) == (graphs, products + 1)


def test_adapters_and_their_dropout_keep_their_bits():
    """The frozen matrix and the adapter's second one are left out, no mask changes."""
    spec = twin("Qwen3", lora=ADAPTED)
    assert left_out(spec, 0) == (
        "mlp.down_proj.lora_B.default.weight",
        "mlp.down_proj.base_layer.weight",
    )
    layer = Layer(spec, "aot_eager_decomp_partition")
    seeds_B = torch.tensor([5, -7])
    found, wanted = (layer.gradients(again=again, seeds_B=seeds_B) for again in (True, False))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    other = layer.gradients(again=True, seeds_B=seeds_B + 1)
    assert not any(torch.equal(a, b) for a, b in zip(found, other, strict=True))


def test_a_layer_that_routes_recomputes_whole():
    """Other graphs could round its router's logits otherwise than forward did."""
    spec = twin("GLM-4.5")
    templates = Templates(spec, compiler=Compiler("eager"))
    for index in range(spec.num_layers):
        calls = templates._templates[index].calls
        assert (calls.again is calls.plain) == templates.routes(index)
        assert left_out(spec, index) == (() if templates.routes(index) else DOWN)
    assert len({templates.routes(index) for index in range(spec.num_layers)}) == 2


def test_elements_of_what_is_left_out():
    spec = twin("stablelm, parallel")
    hidden, inner = spec.hidden_size, spec.config.intermediate_size
    assert num_left_out(spec, 0) == hidden * (hidden + inner)
