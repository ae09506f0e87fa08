"""How many elements a layer holds a token: kept for its backward, or while it is at work. Pure."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from headrace.models.expert_adapters import aligned
from headrace.models.flops import expert_counts, head_sizes
from headrace.models.left_out import left_out

if TYPE_CHECKING:
    from headrace.models.spec import ModelSpec
    from headrace.store.layout import ParamSpec, UnitLayout


def kept_elements_per_token(spec: ModelSpec, layer: UnitLayout) -> int:
    """What a kept layer saves a token: its input, matmul results and the attention result.

    The result of the last matrix (the one that is added to the residual) is not read by backward.
    Experts save for as many as a token uses.
    """
    outputs = sum(_outputs(spec, layer, p) for p in layer.params if len(p.shape) >= 2)
    return outputs + int(spec.config.num_attention_heads) * head_sizes(spec)[1]


def _outputs(spec: ModelSpec, layer: UnitLayout, param: ParamSpec) -> int:
    """Elements a token of what a matrix gives; experts lie in one parameter, (X, O, I) or not."""
    if param.adapter and ".lora_A." in param.name:
        assert spec.adapters is not None
        rows = param.shape[0]
        rank = spec.adapters.rank(param.name, rows)
        return rows if rank == rows else chosen_experts(spec) * aligned(rank)
    if len(param.shape) != 3 or ".experts." not in param.name:
        return param.shape[0]
    chosen = chosen_experts(spec)
    if not param.local_name.endswith("down_proj"):
        _, one, other = param.shape
        return chosen * (other if one == spec.hidden_size else one)
    # Weighted after a bias, else before the matrix (:mod:`headrace.models.experts`).
    biased = any(p.local_name == f"{param.local_name}_bias" for p in layer.params)
    return chosen * spec.hidden_size if biased else 0


def chosen_experts(spec: ModelSpec) -> int:
    """Experts that a token uses."""
    return expert_counts(spec.config)[1] or 1


@functools.lru_cache(maxsize=4)  # a search asks for one model thousands of times
def kept_by_layer(spec: ModelSpec) -> tuple[int, ...]:
    """:func:`kept_elements_per_token` of every layer."""
    return tuple(kept_elements_per_token(spec, layer) for layer in spec.units[1:-1])


@functools.lru_cache(maxsize=4)
def unmultiplied_by_layer(spec: ModelSpec) -> tuple[int, ...]:
    """Elements a token that enter the matrices which a compiled recompute leaves out, by layer."""
    return tuple(
        sum(p.shape[1] for p in unit.params if p.local_name in left_out(spec, index))
        for index, unit in enumerate(spec.units[1:-1])
    )


@functools.lru_cache(maxsize=64)
def largest_layer(spec: ModelSpec, without: frozenset[int]) -> tuple[int, int]:
    """What it keeps a token, and its trainable elements; 0 where none is left."""
    layers = [unit for i, unit in enumerate(spec.units[1:-1]) if i not in without]
    if not layers:
        return 0, 0
    layer = max(layers, key=lambda unit: unit.size)
    return kept_elements_per_token(spec, layer), layer.num_trainable


def row_elements(spec: ModelSpec, layer: int) -> int:
    """What experts that run by themselves hold of a row: each result, and its gradient."""
    experts = spec.experts[layer]
    names, width = experts.local_names, experts.output_size
    products = [
        param.numel // (experts.num_experts * width)
        for param in spec.units[1 + layer].params
        if param.local_name in names and len(param.shape) == 3
    ]
    # The input, the first product, what becomes of it before and after the weights, the second.
    return 2 * (2 * width + max(products) + 2 * min(products))
