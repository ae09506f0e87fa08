"""Model FLOPs: what a training step must compute, whatever recomputes or overlaps.

Convention: 6 FLOPs a matmul parameter and token (forward 2, backward 4), the head counted once and
the embedding look-up not, plus causal attention: 6 * layers * sequence * heads * head size a token
(half of the full square, forward and backward). Recompute is not counted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.models.spec import ModelSpec


def matmul_parameters(spec: ModelSpec) -> int:
    """Parameters that multiply every token: matrices of the layers, and the head."""
    layers = sum(
        param.numel for unit in spec.units[1:-1] for param in unit.params if len(param.shape) >= 2
    )
    return layers + spec.vocab_size * spec.hidden_size


def flops_per_token(spec: ModelSpec, sequence_length: int) -> float:
    """Model FLOPs a token of a training step, for documents of ``sequence_length`` tokens."""
    config = spec.config
    head_size = getattr(config, "head_dim", None) or spec.hidden_size // config.num_attention_heads
    attention = 6 * spec.num_layers * sequence_length * config.num_attention_heads * head_size
    return 6.0 * matmul_parameters(spec) + float(attention)
