"""Mixtures of experts: balancing loss, idle experts, routing in recompute, load, compilation."""

import pytest
import torch
from transformers import AutoConfig

from headrace.engine import routing
from headrace.errors import NumericsError
from headrace.models.experts import (
    _Collect,
    _Pick,
    _Spread,
    add_bias,
    by_expert,
    grouped_matmul,
    sort_assignments,
)
from headrace.models.routing import fingerprint
from headrace.models.spec import ModelSpec
from headrace.selftest.checks import relative_errors, streamed_gradients
from headrace.selftest.reference import reference_gradients, reference_model
from headrace.selftest.twin import filled_state, make_batches
from tiny import EXPERT_SIZES, make_engine

SIZES = EXPERT_SIZES | {"head_dim": 16, "sliding_window": 5}
FAMILIES = ["mixtral", "qwen3_moe", "olmoe", "gpt_oss", "minimax_m2"]


def model_of(family, **values):
    lacks = ("head_dim", "sliding_window") if family == "olmoe" else ()
    sizes = {name: size for name, size in SIZES.items() if name not in lacks}
    config = AutoConfig.for_model(family, **sizes | values)
    spec = ModelSpec(config)
    return spec, filled_state(spec)


def balanced(family, coefficient=0.5, **values):
    return model_of(family, output_router_logits=True, router_aux_loss_coef=coefficient, **values)


def router_names(spec):
    return [n for n in spec.parameter_names() if ".gate.weight" in n or ".router.weight" in n]


@pytest.mark.parametrize("cuts", [(), (4, 11)], ids=["rows", "packed"])
@pytest.mark.parametrize("per_wave", [None, 1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_auxiliary_loss_absent_or_unscaled_under_accumulation(family, per_wave, cuts):
    """Pitfall 11. Three micro-batches of different counts: the class's own loss, whatever wave."""
    spec, state = balanced(family)
    batches = make_batches(3, cuts=cuts)
    _, wanted = reference_gradients(reference_model(spec, state), batches)
    for activations in ("keep", "recompute"):
        _, found = streamed_gradients(
            spec, state, batches, activations=activations, micro_batches_per_wave=per_wave
        )
        errors = relative_errors(found, wanted)
        assert max(errors.values()) <= 1e-5, max(errors, key=errors.get)
    # The check can fail: without the loss, and with it counted once a micro-batch.
    for coefficient in (0.0, 1.5):
        other, other_state = balanced(family, coefficient)
        _, found = streamed_gradients(other, other_state, batches)
        errors = relative_errors(found, wanted)
        assert max(errors[name] for name in router_names(spec)) > 1e-2


def test_auxiliary_loss_is_left_out_unless_the_configuration_asks():
    """As transformers: by ``output_router_logits``."""
    spec, state = model_of("mixtral", router_aux_loss_coef=0.5)
    with make_engine(spec, state) as engine:
        result = engine.step(make_batches(1), learning_rate=0.0)
    assert spec.auxiliary_loss.coefficient == 0
    assert result.auxiliary_loss is None


def test_auxiliary_loss_is_reported():
    """Over two micro-batches, weighted by supervised tokens."""
    spec, state = balanced("qwen3_moe")
    batches = make_batches(2)
    model = reference_model(spec, state)
    wanted = 0.0
    for batch in batches:
        with torch.no_grad():
            output = model(input_ids=batch.input_ids_BT, output_router_logits=True)
        share = batch.num_supervised_tokens / sum(b.num_supervised_tokens for b in batches)
        wanted += share * float(output.aux_loss)
    with make_engine(spec, state) as engine:
        result = engine.step(batches, learning_rate=0.0)
    assert result.auxiliary_loss == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_unused_expert_shifts_or_hangs_everything_after_it(activations):
    """Pitfall 12. Expert 3 is never chosen: zero gradients, and all others as they should be."""
    spec, state = model_of("gpt_oss")
    for unit in state.units[1:-1]:
        bias = next(p for p in unit.layout.params if p.local_name == "mlp.router.bias")
        value = unit.master(bias)
        value[3] = -1e4
        unit.set_master(bias, value)
    batches = make_batches(2, cuts=(4, 11))
    _, wanted = reference_gradients(reference_model(spec, state), batches)
    # Twice: the second time, accumulators hold what the first step left.
    with make_engine(spec, state, activations=activations, gradient_slots=1) as engine:
        for _ in range(2):
            result = engine.step(batches, learning_rate=0.0, max_grad_norm=1.0)
            found = {
                param.name: flat[param.slice].view(param.shape).clone()
                for unit, layout in enumerate(spec.units)
                for flat in (engine.updater.returned_gradient(unit),)
                for param in layout.params
            }
            errors = relative_errors(found, wanted)
            assert max(errors.values()) <= 1e-5, max(errors, key=errors.get)
            experts = [g for name, g in found.items() if ".experts." in name]
            assert len(experts) == 12
            assert all(bool((gradient[3] == 0).all()) for gradient in experts)
            assert all(result.num_idle_experts[layer] >= 1 for layer in range(3))


def test_load_of_every_layer_is_reported():
    spec, state = model_of("mixtral")
    with make_engine(spec, state) as engine:
        even = engine.step(make_batches(4), learning_rate=0.0)
    assert even.busiest_expert.keys() == even.num_idle_experts.keys() == {0, 1, 2}
    assert all(1 <= busiest <= 4 for busiest in even.busiest_expert.values())
    spec, state = model_of("gpt_oss")
    unit = state.units[2]
    bias = next(p for p in unit.layout.params if p.local_name == "mlp.router.bias")
    unit.set_master(bias, torch.tensor([50.0, 40.0, *[0.0] * 6]))
    with make_engine(spec, state) as engine:
        uneven = engine.step(make_batches(2), learning_rate=0.0)
    assert uneven.busiest_expert[1] == 4  # two of eight experts take all
    assert uneven.num_idle_experts[1] == 6


def test_dense_layers_have_no_load():
    spec, state = model_of(
        "glm4_moe", n_routed_experts=8, n_group=1, topk_group=1, first_k_dense_replace=2
    )
    for activations in ("keep", "recompute"):
        with make_engine(spec, state, activations=activations) as engine:
            result = engine.step(make_batches(1), learning_rate=0.0)
        assert result.busiest_expert.keys() == {2}


def test_recompute_that_routes_elsewhere_is_an_error(monkeypatch):
    """Its gradient would be that of another function than the loss."""
    spec, state = model_of("mixtral")
    original = routing._prints
    calls = []

    def changed(outputs):
        calls.append(1)
        prints = original(outputs)
        return [p + 1 for p in prints] if len(calls) == 5 else prints

    monkeypatch.setattr(routing, "_prints", changed)
    with (
        make_engine(spec, state, activations="recompute") as engine,
        pytest.raises(NumericsError, match="other experts"),
    ):
        engine.step(make_batches(1), learning_rate=1e-3, max_grad_norm=1.0)


def test_fingerprint_sees_one_token_and_one_exchange():
    chosen = torch.tensor([[0, 1], [2, 3], [1, 0]])
    other = chosen.clone()
    other[1, 1] = 4
    assert fingerprint(chosen) != fingerprint(other)
    assert fingerprint(chosen) != fingerprint(chosen.flip(0))
    assert fingerprint(chosen) == fingerprint(chosen.clone())


# Of torch's own: it makes instances of autograd functions while tracing, and scripts on import.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_compiled_layers_route_and_balance_as_eager_ones(family, activations):
    """Traced whole, with the routers' hooks, kept graphs and poisoned slots."""
    # Windows are read document by document on the CPU, which no graph can hold.
    spec, state = balanced(family, num_hidden_layers=2, sliding_window=None)
    batches = make_batches(2)
    _, wanted = streamed_gradients(spec, state, batches, activations=activations)
    compiled = {"compile": True, "compile_backend": "aot_eager_decomp_partition"}
    _, found = streamed_gradients(spec, state, batches, activations=activations, **compiled)
    errors = relative_errors(found, wanted)
    assert max(errors.values()) <= 5e-5, max(errors, key=errors.get)


# Of torch's own: it makes instances of autograd functions while tracing.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("top_k", [1, 3])
def test_traced_functions_keep_their_gradient(dtype, top_k):
    """torch 2.11 loses that of a function whose forward ends with a cast to the dtype it has."""
    index_NK = torch.stack([torch.randperm(4)[:top_k] for _ in range(6)])
    order_S, inverse_NK, *_ = sort_assignments(index_NK, 4)
    for function, shape in ((_Spread, (6, 5)), (_Collect, (6 * top_k, 5)), (_Pick, (6, top_k))):
        torch._dynamo.reset()
        values = torch.randn(shape).to(dtype).requires_grad_()

        def call(values, apply=function.apply):
            return apply(values, order_S, inverse_NK)

        traced = torch.compile(call, backend="eager", fullgraph=True)
        gradients = [
            torch.autograd.grad(run(values).float().square().sum(), values)[0]
            for run in (call, traced)
        ]
        assert gradients[0].any()
        assert torch.equal(*gradients), function


def test_gradient_of_a_bias_is_summed_in_bfloat16():
    """Thousands of rows an expert, and one expert without any."""
    generator = torch.Generator().manual_seed(0)
    expert = torch.randint(0, 3, (12_000,), generator=generator).sort().values
    rows = torch.randn(12_000, 8, generator=generator).bfloat16().requires_grad_()
    bias = torch.randn(4, 8, generator=generator).bfloat16().requires_grad_()
    out = add_bias(rows, bias, expert)
    assert torch.equal(out, rows + bias[expert])
    upstream = (1 + torch.rand(12_000, 8, generator=generator)).bfloat16()
    rows_grad, bias_grad = torch.autograd.grad(out, [rows, bias], upstream)
    assert torch.equal(rows_grad, upstream)
    wanted = torch.zeros(4, 8, dtype=torch.float64).index_add_(0, expert, upstream.double())
    torch.testing.assert_close(bias_grad.double(), wanted, rtol=2.0**-8, atol=0)
    assert not bias_grad[3].any()


def test_rounding_of_a_token_depends_on_the_others_of_its_expert():
    generator = torch.Generator().manual_seed(0)
    rows, others = (torch.randn(count, 32, generator=generator) for count in (11, 37))
    weight = torch.randn(1, 24, 32, generator=generator).transpose(1, 2)
    upstream = torch.randn(48, 24, generator=generator)

    def product(parts, gradient):
        leaf = torch.cat(parts).requires_grad_()
        out = grouped_matmul(leaf, weight, torch.tensor([len(leaf)], dtype=torch.int32))
        return out.detach(), torch.autograd.grad(out, leaf, gradient)[0]

    wanted = product([rows], upstream[:11])
    for number in range(1, 38):
        order = torch.cat([upstream[11 : 11 + number], upstream[:11]])
        found = product([others[:number], rows], order)
        assert all(torch.equal(a[number:], b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ends", [(5, 5, 9, 13), (0, 0, 0, 13), (13, 13, 13, 13)])
def test_grouped_product_against_a_loop(dtype, ends):
    """Groups without rows have zero gradients."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(13, 10, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(4, 6, 10, generator=generator).to(dtype).requires_grad_()
    out = grouped_matmul(rows, weight.transpose(1, 2), torch.tensor(ends, dtype=torch.int32))
    starts = (0, *ends[:-1])
    wanted = torch.cat(
        [rows[a:b] @ weight[x].T for x, (a, b) in enumerate(zip(starts, ends, strict=True))]
    )
    torch.testing.assert_close(out, wanted)
    upstream = torch.randn(out.shape, generator=generator).to(dtype)
    found = torch.autograd.grad(out, [rows, weight], upstream)
    reference = torch.autograd.grad(wanted, [rows, weight], upstream)
    for value, other in zip(found, reference, strict=True):
        torch.testing.assert_close(value, other)
    idle = [x for x, (a, b) in enumerate(zip(starts, ends, strict=True)) if a == b]
    assert bool((found[1][idle] == 0).all())


@pytest.mark.parametrize("num_experts", [4, 256, 257])
def test_assignments_by_expert_with_some_idle(num_experts):
    """Also where a byte holds no expert's number, or just so."""
    generator = torch.Generator().manual_seed(num_experts)
    index = torch.randint(0, num_experts, (60, 2), generator=generator).flatten()
    index[:50] = num_experts - 1
    index[50:60] = 0
    expert, order, ends = by_expert(index, num_experts)
    assert order.tolist() == sorted(range(120), key=lambda at: int(index[at]))
    assert expert.tolist() == index[order].tolist()
    assert ends.tolist() == index.bincount(minlength=num_experts).cumsum(0).tolist()
    assert ends.dtype == torch.int32
