"""Model FLOPs: what a training step must compute, whatever recomputes or overlaps.

Convention: 6 FLOPs a matmul parameter and token (forward 2, backward 4; a frozen one 4, for it has
no gradient of its own; 2 below the first layer that is trained, where there is no backward), the
head counted once and the embedding look-up not, experts by the share that a token uses, plus causal
attention: 6 * heads * head size * length**2 a layer and document (half of the full square, forward
and backward, a third of it forward), within the window of a sliding layer. Recompute is not
counted, nor the recurrent state of linear attention.
"""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.models.building import value_of

if TYPE_CHECKING:
    import numpy.typing as npt

    from headrace.models.spec import ModelSpec
    from headrace.store.layout import ParamSpec

_EXPERT = re.compile(r"\.experts\.")
# By transformers' names; most classes map theirs to these.
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")


def matmul_parameters(spec: ModelSpec) -> int:
    """Parameters that multiply a token: matrices of the layers it uses, and the head."""
    return round(sum(_used(spec, param) for _, param in _matrices(spec))) + _head(spec)


def flops_per_token(spec: ModelSpec, sequence_length: int) -> float:
    """Model FLOPs a token of a training step, for documents of ``sequence_length`` tokens."""
    return step_flops(spec, np.array([sequence_length])) / sequence_length


def step_flops(spec: ModelSpec, lengths: npt.NDArray[np.integer[Any]]) -> float:
    """Model FLOPs of a training step.

    Args:
        spec: the model.
        lengths: tokens of each document (or piece of one) that attends within itself.
    """
    first = spec.first_trained_layer
    matrices = sum(
        (2 if layer < first else 6 if param.trainable else 4) * _used(spec, param)
        for layer, param in _matrices(spec)
    )
    tokens, attention = float(lengths.sum()), _attention_flops(spec, lengths)
    attended = sum(attention) - sum(attention[:first]) * 2 / 3
    return tokens * (matrices + _head_factor(spec) * _head(spec)) + attended


def forward_flops_per_token(spec: ModelSpec, sequence_length: int) -> tuple[float, float]:
    """Model FLOPs a token of the layers' forward: of their matrices, and of attention."""
    attention = sum(_attention_flops(spec, np.array([sequence_length]))) / 3
    return 2.0 * (matmul_parameters(spec) - _head(spec)), attention / sequence_length


def head_sizes(spec: ModelSpec) -> tuple[int, int]:
    """Elements of a head's queries and keys, and of its values; latent attention's differ.

    There ``head_dim`` is that of the rotary part alone (DeepSeek-V3, arXiv:2412.19437, 2.1.1).
    """
    config = spec.config
    size = getattr(config, "head_dim", None) or spec.hidden_size // config.num_attention_heads
    # A key that the class does not have is kept by transformers, and means nothing.
    known = {field.name for field in dataclasses.fields(config)}
    own = {
        name: int(getattr(config, name) or size) if name in known else None
        for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    }
    nope, rope, values = own.values()
    scores = size if nope is None or rope is None else nope + rope
    return int(scores), int(size if values is None else values)


def expert_counts(config: Any) -> tuple[int | None, int | None]:
    """Routed experts of a layer, and how many of them a token goes to, by a configuration."""
    found = (
        next((n for name in names if isinstance(n := value_of(config, name), int)), None)
        for names in (_NUM_EXPERTS, _CHOSEN)
    )
    num_experts, chosen = found
    return num_experts, chosen


def _matrices(spec: ModelSpec) -> list[tuple[int, ParamSpec]]:
    """Those of the layers, each with the index of its layer."""
    return [
        (layer, param)
        for layer, unit in enumerate(spec.units[1:-1])
        for param in unit.params
        if len(param.shape) >= 2
    ]


def _head(spec: ModelSpec) -> int:
    return spec.vocab_size * spec.hidden_size


def _head_factor(spec: ModelSpec) -> int:
    """As of other matrices; a tied one is the embedding's."""
    unit = spec.units[0] if spec.tied else spec.units[-1]
    name = spec.embedding_name if spec.tied else "head.weight"
    return 6 if any(p.trainable for p in unit.params if p.local_name == name) else 4


def _used(spec: ModelSpec, param: ParamSpec) -> float:
    if not _EXPERT.search(param.name):
        return param.numel
    num_experts, chosen = expert_counts(spec.config)
    return param.numel * chosen / num_experts if num_experts and chosen else param.numel


def _attention_flops(spec: ModelSpec, lengths: npt.NDArray[np.integer[Any]]) -> list[float]:
    """Of each layer, forward and backward."""
    config = spec.config
    scores, values = head_sizes(spec)
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        kinds = ["sliding_attention" if window else "full_attention"] * spec.num_layers
    full = lengths.astype(np.float64)
    seen = full if not window else np.minimum(full, window)
    squares = {
        "full_attention": float((full**2).sum()),
        # A band of the window's width: twice its area, for the convention halves the square.
        "sliding_attention": float((2 * full * seen - seen**2).sum()),
    }
    # 6 n_h (d_qk + d_v) / 2 a pair: scores and values are a product each.
    one = 3.0 * float(config.num_attention_heads * (scores + values))
    return [one * squares.get(kind, 0.0) for kind in kinds]
