"""From a configuration to exact sizes: parameters, matmul work and kept activations by unit.

Legend: H hidden width, V vocabulary, I intermediate width, E experts, k experts a token.

Invariant: ``Architecture.num_parameters`` equals the count of the module that transformers
builds from the same configuration, to the last element. FLOPs follow the usual convention
(6 x matmul parameters that a token uses, head included, look-ups not; causal attention at half
the square; recompute never counted). Pure: no torch, no weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from headrace.errors import ConfigError
from headrace.plan.families import Config, Family, flag, read_family

if TYPE_CHECKING:
    from collections.abc import Mapping


_MOST_LAYERS = 10_000  # each is sized on its own


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The routed experts of a layer.

    Attributes:
        count: all of them.
        chosen: those that a token uses.
        size: parameters of one.
        matmul: those of one in matrices.
        kept_elements: outputs of one's matmuls that a token leaves for backward.
        width: of their results, one after another, for one row.
    """

    count: int
    chosen: int
    size: int
    matmul: int
    kept_elements: int
    width: int


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One decoder layer.

    Attributes:
        mixer: ``"full"``, ``"sliding"`` or ``"linear"`` attention.
        sparse: its MLP is a mixture of experts.
        num_parameters: all of them.
        num_active_matmul: matmul parameters that one token uses.
        attention_width: multiply-adds of one (query, key) pair, scores and values together.
        state_flops: forward FLOPs a token of the recurrent state (linear attention).
        window: keys a query sees at most; None for all before it.
        kept_elements: outputs of matmuls and attention a token leaves for backward.
        adapted_width: inputs and outputs of all linear layers that get low-rank adapters.
        num_left_out: matmul parameters that a compiled recompute does not multiply: the last
            matrix, where only the residual sum reads its product and nothing routes.
        experts: its routed experts, if any.
    """

    mixer: str
    sparse: bool
    num_parameters: int
    num_active_matmul: int
    attention_width: int
    state_flops: int
    window: int | None
    kept_elements: int
    adapted_width: int = 0
    num_left_out: int = 0
    experts: Experts | None = None

    def attention_flops(self, length: int) -> float:
        """Forward FLOPs a token of attention, averaged over a causal sequence of ``length``."""
        if self.mixer == "linear":
            return float(self.state_flops)
        keys = length / 2
        if self.window is not None and self.window < length:
            keys = self.window - self.window**2 / (2 * length)
        return 2 * self.attention_width * keys


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Sizes of a causal language model.

    Attributes:
        model_type: family in transformers' spelling.
        hidden_size: H.
        vocab_size: V.
        tied: the head's matrix is the embedding's.
        layers: in order.
        max_positions: longest sequence, None where the configuration does not say.
    """

    model_type: str
    hidden_size: int
    vocab_size: int
    tied: bool
    layers: tuple[Layer, ...]
    max_positions: int | None

    @property
    def num_embedding(self) -> int:
        """Parameters of the embedding."""
        return self.vocab_size * self.hidden_size

    @property
    def num_head(self) -> int:
        """Parameters of the head unit: final norm, and the LM head unless it is tied."""
        return self.hidden_size + (0 if self.tied else self.num_embedding)

    @cached_property
    def num_parameters(self) -> int:
        """All parameters; a tied head counts once."""
        return self.num_embedding + sum(x.num_parameters for x in self.layers) + self.num_head

    @cached_property
    def num_active_parameters(self) -> int:
        """Matmul parameters that one token uses, head included."""
        return sum(x.num_active_matmul for x in self.layers) + self.num_embedding

    @property
    def largest_layer(self) -> int:
        """Parameters of the largest decoder layer."""
        return max(x.num_parameters for x in self.layers)

    @property
    def largest_unit(self) -> int:
        """Parameters of the largest streamed unit (a layer, the embedding or the head)."""
        return max(self.largest_layer, self.num_embedding, self.num_head)

    def num_adapter_parameters(self, rank: int) -> int:
        """Parameters of adapters of ``rank`` on every linear layer of the decoder."""
        return rank * sum(x.adapted_width for x in self.layers)

    @property
    def sparse(self) -> bool:
        """Whether any layer is a mixture of experts."""
        return any(x.sparse for x in self.layers)

    def matmul_flops(self) -> float:
        """Forward and backward FLOPs a token in matmuls: 6 a parameter used."""
        return 6.0 * self.num_active_parameters

    def attention_flops(self, length: int) -> float:
        """Forward and backward FLOPs a token in attention, for sequences of ``length``."""
        return 3.0 * sum(x.attention_flops(length) for x in self.layers)

    def flops_per_token(self, length: int) -> float:
        """Model FLOPs a token, forward and backward."""
        return self.matmul_flops() + self.attention_flops(length)


@dataclass(frozen=True)
class _Part:
    """Parameters, matmul parameters a token uses, elements kept for backward."""

    params: int
    active: int
    kept: int
    width: int = 0
    state_flops: int = 0
    adapted: int = 0

    def __add__(self, other: _Part) -> _Part:
        return _Part(
            self.params + other.params,
            self.active + other.active,
            self.kept + other.kept,
            self.width + other.width,
            self.state_flops + other.state_flops,
            self.adapted + other.adapted,
        )


def _linear(inputs: int, outputs: int, *, bias: bool = False, modules: int = 1) -> _Part:
    """``modules`` linear layers on the same input; 0 for one that gets no adapter."""
    weights = inputs * outputs
    return _Part(
        weights + (outputs if bias else 0),
        weights,
        outputs,
        adapted=modules * inputs + outputs if modules else 0,
    )


def _need(config: Config, key: str, *, most: int = 2**40, why: str = "above any model's") -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(
            f"the configuration's {key} is {value!r}; a positive integer is needed to size a layer",
            remedy="use the complete config.json of the model",
        )
    if value > most:
        raise ConfigError(
            f"the configuration's {key} is {value:,}; the limit is {most:,}, {why}",
            remedy="use the complete config.json of the model",
        )
    return value


def _have(config: Config, key: str, default: int) -> int:
    return default if config.get(key) is None else _need(config, key)


def _grouped_query(family: Family, config: Config) -> _Part:
    hidden, heads = _need(config, "hidden_size"), _need(config, "num_attention_heads")
    groups = _have(config, "num_key_value_heads", heads)
    head_dim = _have(config, "head_dim", hidden // heads)
    queries, keys = heads * head_dim, groups * head_dim
    bias = flag(family.qkv_bias, config)
    part = _linear(hidden, queries * (2 if family.gated_query else 1), bias=bias)
    part += _linear(hidden, keys, bias=bias) + _linear(hidden, keys, bias=bias)
    if "qkv" in family.fused:
        part += _Part(0, 0, 0, adapted=-2 * hidden)
    part += _linear(queries, hidden, bias=flag(family.out_bias, config))
    # GLM-4.5 switches the query and key norms by a key of its configuration.
    normed = family.qk_norm if config.get("use_qk_norm", True) else None
    norms = {"head": 2 * head_dim, "full": queries + keys, None: 0}[normed]
    sinks = heads if family.sinks else 0
    return part + _Part(norms + sinks, 0, queries, width=2 * queries)


def _latent(family: Family, config: Config) -> _Part:
    hidden, heads = _need(config, "hidden_size"), _need(config, "num_attention_heads")
    rank, rope = _need(config, "kv_lora_rank"), _need(config, "qk_rope_head_dim")
    nope, value_dim = _need(config, "qk_nope_head_dim"), _need(config, "v_head_dim")
    bias = flag(family.qkv_bias, config)
    query_rank = config.get("q_lora_rank")
    if query_rank:
        part = _linear(hidden, query_rank, bias=bias) + _Part(query_rank, 0, 0)
        part += _linear(query_rank, heads * (nope + rope))
    else:
        part = _linear(hidden, heads * (nope + rope))
    part += _linear(hidden, rank + rope, bias=bias) + _Part(rank, 0, 0)
    part += _linear(rank, heads * (nope + value_dim))
    part += _linear(heads * value_dim, hidden, bias=flag(family.out_bias, config))
    return part + _Part(0, 0, heads * value_dim, width=heads * (nope + rope + value_dim))


def _gated_delta(family: Family, config: Config) -> _Part:
    """Gated DeltaNet (arXiv:2412.06464) as Qwen3-Next and Qwen3.5 lay it out."""
    hidden, num_values = _need(config, "hidden_size"), _need(config, "linear_num_value_heads")
    key_dim, value_dim = (
        _need(config, "linear_key_head_dim"),
        _need(config, "linear_value_head_dim"),
    )
    keys = _need(config, "linear_num_key_heads") * key_dim
    values = num_values * value_dim
    mixed = 2 * keys + values
    part = _linear(hidden, mixed) + _linear(hidden, values)
    part += _linear(hidden, 2 * num_values, modules=2)
    if "delta" in family.fused:
        part += _Part(0, 0, 0, adapted=-2 * hidden)
    part += _linear(values, hidden)
    convolution = mixed * _need(config, "linear_conv_kernel_dim")
    # Decay and delta rule, outer product, read-out: three products of a key by a value a head.
    state = 6 * num_values * key_dim * value_dim
    vectors = 2 * num_values + value_dim
    return part + _Part(convolution + vectors, convolution, mixed + values, state_flops=state)


def _dense_mlp(family: Family, config: Config) -> _Part:
    hidden, inner = _need(config, "hidden_size"), _need(config, "intermediate_size")
    bias = flag(family.mlp_bias, config)
    # PEFT takes the names of a sparse family's dense MLPs for those of its experts.
    sparse = family.expert_size is not None
    modules = 0 if sparse else 1 if "gate_up" in family.fused else 2
    part = _linear(hidden, 2 * inner, bias=bias, modules=modules)
    return part + _linear(inner, hidden, bias=bias, modules=0 if sparse else 1)


def _experts(family: Family, config: Config) -> Experts:
    assert family.expert_size is not None
    hidden, inner = _need(config, "hidden_size"), _need(config, family.expert_size)
    key = next((name for name in family.num_experts if name in config), family.num_experts[0])
    count = _need(config, key)
    return Experts(
        count=count,
        chosen=_need(config, "num_experts_per_tok", most=count, why="as many as there are"),
        size=3 * hidden * inner + (2 * inner + hidden if family.expert_bias else 0),
        matmul=3 * hidden * inner,
        kept_elements=2 * inner + hidden,
        # The input, both halves of the first product, before and after the weights, the second.
        width=2 * hidden + 4 * inner,
    )


def _expert_mlp(family: Family, config: Config) -> _Part:
    assert family.expert_size is not None
    hidden, found = _need(config, "hidden_size"), _experts(family, config)
    inner, experts, active = _need(config, family.expert_size), found.count, found.chosen
    router_bias = experts if family.expert_bias else 0
    part = _Part(
        experts * found.size + router_bias, active * found.matmul, active * found.kept_elements
    )
    part += _linear(hidden, experts, modules=0)
    shared = 0
    if family.shared_size is not None:
        shared = int(config.get(family.shared_size) or 0)
    elif family.num_shared is not None:
        shared = int(config.get(family.num_shared) or 0) * inner
    if shared:
        adapted = family.adapted_shared
        part += _linear(hidden, 2 * shared, modules=2 if adapted else 0)
        part += _linear(shared, hidden, modules=1 if adapted else 0)
        if family.shared_gate:
            part += _linear(hidden, 1)
    return part


def _mixers(family: Family, config: Config, num_layers: int) -> list[str]:
    kinds = config.get("layer_types")
    if kinds is None:
        interval = config.get("full_attention_interval")
        if interval:
            return ["full" if (i + 1) % interval == 0 else "linear" for i in range(num_layers)]
        # The window holds only where the family switches it on (Qwen's use_sliding_window).
        window = config.get("sliding_window") and config.get("use_sliding_window", True)
        period = family.full_every or num_layers + 1
        return ["sliding" if window and (i + 1) % period else "full" for i in range(num_layers)]
    names = {"full_attention": "full", "sliding_attention": "sliding", "linear_attention": "linear"}
    unknown = sorted(set(kinds) - set(names))
    if unknown or len(kinds) < num_layers:
        raise ConfigError(
            f"layer_types has {len(kinds)} entries for {num_layers} layers"
            + (f" and the unknown kinds {', '.join(unknown)}" if unknown else ""),
            remedy="use the complete config.json of the model",
        )
    return [names[kind] for kind in kinds[:num_layers]]


def _is_sparse(index: int, family: Family, config: Config) -> bool:
    if family.expert_size is None:
        return False
    if family.dense_first is not None:
        return index >= int(config.get(family.dense_first) or 0)
    if index in (config.get("mlp_only_layers") or ()):
        return False
    return (index + 1) % int(config.get("decoder_sparse_step") or 1) == 0


def read_architecture(config: Mapping[str, Any]) -> Architecture:
    """Sizes of the causal language model that ``config`` describes.

    Args:
        config: a Hugging Face ``config.json`` as a mapping; of a multimodal model the language
            part counts.

    Raises:
        ConfigError: the family is unknown, or a size is missing.
    """
    model_type, family, text = read_family(config)
    hidden, num_layers = (
        _need(text, "hidden_size"),
        _need(text, "num_hidden_layers", most=_MOST_LAYERS),
    )
    full = _latent(family, text) if family.attention == "mla" else _grouped_query(family, text)
    window = text.get("sliding_window")
    mixers = _mixers(family, text, num_layers)
    mixer_parts = {"full": full, "sliding": full}
    if "linear" in mixers:
        mixer_parts["linear"] = _gated_delta(family, text)
    norms = _Part(family.block_norms * hidden, 0, 0)
    layers = []
    for index, mixer in enumerate(mixers):
        sparse = _is_sparse(index, family, text)
        mlp = _expert_mlp(family, text) if sparse else _dense_mlp(family, text)
        part = mixer_parts[mixer] + mlp + norms
        whole = sparse or family.norm_after
        layers.append(
            Layer(
                mixer=mixer,
                sparse=sparse,
                num_parameters=part.params,
                num_active_matmul=part.active,
                attention_width=part.width,
                state_flops=part.state_flops,
                window=int(window) if mixer == "sliding" and window else None,
                kept_elements=part.kept,
                adapted_width=part.adapted,
                num_left_out=0 if whole else hidden * _need(text, "intermediate_size"),
                experts=_experts(family, text) if sparse else None,
            )
        )
    return Architecture(
        model_type=model_type,
        hidden_size=hidden,
        vocab_size=_need(text, "vocab_size"),
        tied=bool(text.get("tie_word_embeddings", False)),
        layers=tuple(layers),
        max_positions=text.get("max_position_embeddings"),
    )
