"""Model FLOPs: what a training step must compute, whatever recomputes or overlaps.

Convention: 6 FLOPs a matmul parameter and token (forward 2, backward 4; a frozen one 4, for it has
no gradient of its own; 2 below the first layer that is trained, where there is no backward), the
head counted once and the embedding look-up not, experts by the share that a token uses, plus causal
attention: 6 * heads * head size * length**2 a layer and document (half of the full square, forward
and backward, a third of it forward), within the window of a sliding layer. Recompute is not
counted, nor the recurrent state of linear attention.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from headrace.models.spec import ModelSpec
    from headrace.store.layout import ParamSpec

_EXPERT = re.compile(r"\.experts\.")
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


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
    return tokens * (matrices + 6.0 * _head(spec)) + attended


def forward_flops_per_token(spec: ModelSpec, sequence_length: int) -> tuple[float, float]:
    """Model FLOPs a token of the layers' forward: of their matrices, and of attention."""
    attention = sum(_attention_flops(spec, np.array([sequence_length]))) / 3
    return 2.0 * (matmul_parameters(spec) - _head(spec)), attention / sequence_length


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


def _used(spec: ModelSpec, param: ParamSpec) -> float:
    if not _EXPERT.search(param.name):
        return param.numel
    found = [getattr(spec.config, name, None) for name in _NUM_EXPERTS]
    num_experts = next((count for count in found if count), None)
    chosen = getattr(spec.config, "num_experts_per_tok", None)
    return param.numel * chosen / num_experts if num_experts and chosen else param.numel


def _attention_flops(spec: ModelSpec, lengths: npt.NDArray[np.integer[Any]]) -> list[float]:
    """Of each layer, forward and backward."""
    config = spec.config
    head_size = getattr(config, "head_dim", None) or spec.hidden_size // config.num_attention_heads
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
    one = 6.0 * float(config.num_attention_heads * head_size)
    return [one * squares.get(kind, 0.0) for kind in kinds]
