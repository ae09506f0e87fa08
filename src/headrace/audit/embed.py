"""Embeddings of prompts from any forward pass.

Owns batching, pooling and the cache's use. The invariant: a prompt's vector depends on the
prompt, the weights and the stack, never on the batch it was in, up to rounding: rows are padded
on the right, models are causal, and pooling reads the mask, so it is right for padding on
either side. It holds no model; a model larger than the GPU streams behind the same callable.

Shape legend: B rows, T positions, D hidden size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from headrace.audit.prompts import default_template, render_prompts
from headrace.audit.sources import EmbeddingSource
from headrace.audit.vector_cache import VectorCache
from headrace.errors import ConfigError, DataError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from headrace.audit.panel import Panel

Pooling = Literal["last_token", "mean"]
Forward = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""``(input_ids_BT int64, lengths_B int64) -> hidden_BTD``; from ``lengths`` on there is padding."""


@dataclass(frozen=True, kw_only=True)
class EmbedConfig:
    """How prompts become vectors.

    Attributes:
        pooling: ``last_token`` of the prompt, or ``mean`` over its tokens.
        layer: counted as Hugging Face counts ``hidden_states``; -1 is the last, normed.
        batch_size: prompts a forward pass.
        max_length: tokens; longer prompts are an error, because a cut prompt is another prompt.
    """

    pooling: Pooling = "last_token"
    layer: int = -1
    batch_size: int = 32
    max_length: int = 2048

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        if self.pooling not in {"last_token", "mean"}:
            raise ConfigError(
                f"pooling {self.pooling!r} is neither last_token nor mean", remedy="one of them"
            )
        if self.batch_size < 1 or self.max_length < 1:
            raise ConfigError(
                "batch_size and max_length are at least 1",
                remedy="positive numbers, or leave them out",
            )


def pool(hidden_BTD: torch.Tensor, mask_BT: torch.Tensor, pooling: Pooling) -> torch.Tensor:
    """``(B, D)`` float32: the last unmasked position, or the mean of the unmasked ones.

    Args:
        hidden_BTD: hidden states.
        mask_BT: nonzero at real tokens, wherever the padding is.
        pooling: which.

    Raises:
        DataError: a row without a real token.
    """
    mask = mask_BT.to(device=hidden_BTD.device, dtype=torch.bool)
    if not bool(mask.any(dim=1).all()):
        raise DataError("a prompt has no token to pool", remedy="leave empty prompts out")
    if pooling == "mean":
        weights = mask.float()
        total = torch.einsum("btd,bt->bd", hidden_BTD.float(), weights)
        return total / weights.sum(dim=1, keepdim=True)
    # The last real token has the highest position among the unmasked ones.
    positions = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, positions, -1).max(dim=1).values
    return hidden_BTD[torch.arange(len(last), device=mask.device), last].float()


def embed_prompts(
    prompts: Sequence[str],
    *,
    tokenizer: Any,
    forward: Forward,
    config: EmbedConfig,
    cache: VectorCache | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> NDArray[np.float32]:
    """``(len(prompts), D)``: each distinct prompt once, longest first, what is cached not at all.

    Args:
        prompts: texts.
        tokenizer: Hugging Face tokenizer (called on a list of texts).
        forward: the model.
        config: pooling and batches.
        cache: where vectors are looked up and kept, batch by batch.
        progress: is told (prompts done, prompts to do).

    Raises:
        DataError: naming prompts, for texts without tokens, longer than ``max_length``, or
            whose vector is not finite.
    """
    keys = [hashlib.sha256(text.encode()).digest() for text in prompts]
    vectors: dict[bytes, NDArray[np.float32]] = {} if cache is None else cache.load()
    todo = list({key: i for i, key in enumerate(keys) if key not in vectors}.values())
    ids = tokenizer([prompts[i] for i in todo])["input_ids"] if todo else []
    tokens = {i: list(row) for i, row in zip(todo, ids, strict=True)}
    _check_lengths(tokens, prompts, config)
    todo.sort(key=lambda i: (-len(tokens[i]), i))
    for start in range(0, len(todo), config.batch_size):
        batch = todo[start : start + config.batch_size]
        fresh = _embed_batch([tokens[i] for i in batch], forward, config)
        for i, vector in zip(batch, fresh, strict=True):
            if not np.isfinite(vector).all():
                raise DataError(
                    f"the embedding of prompt {i} is not finite: {prompts[i]!r}",
                    remedy="embed in float32, or look at the model's weights",
                )
            vectors[keys[i]] = vector
        if cache is not None:
            cache.add([keys[i] for i in batch], fresh)
        if progress is not None:
            progress(start + len(batch), len(todo))
    if cache is not None:
        cache.flush()
    return np.stack([vectors[key] for key in keys])


def _check_lengths(
    tokens: dict[int, list[int]], prompts: Sequence[str], config: EmbedConfig
) -> None:
    empty = [i for i, ids in tokens.items() if not ids]
    if empty:
        raise DataError(
            f"prompt {empty[0]} has no token: {prompts[empty[0]]!r}",
            remedy="leave the row out, or write its prompt",
        )
    long = [i for i, ids in tokens.items() if len(ids) > config.max_length]
    if long:
        most = max(len(tokens[i]) for i in long)
        raise DataError(
            f"{len(long)} prompts are longer than {config.max_length} tokens (the longest has "
            f"{most}); the first is prompt {long[0]}",
            remedy="raise max_length, or shorten the prompts: a cut prompt is another prompt",
        )


def _embed_batch(
    batch: list[list[int]], forward: Forward, config: EmbedConfig
) -> NDArray[np.float32]:
    lengths = torch.tensor([len(ids) for ids in batch])
    ids_BT = torch.zeros((len(batch), int(lengths.max())), dtype=torch.int64)
    for row, ids in enumerate(batch):
        ids_BT[row, : len(ids)] = torch.tensor(ids)
    mask_BT = torch.arange(ids_BT.shape[1])[None] < lengths[:, None]
    with torch.no_grad():
        pooled = pool(forward(ids_BT, lengths), mask_BT, config.pooling)
    array: NDArray[np.float32] = pooled.cpu().numpy()
    return array


def embed_panel(
    panel: Panel,
    *,
    tokenizer: Any,
    forward: Forward,
    weights: str,
    stack: dict[str, str],
    template: str | None = None,
    config: EmbedConfig | None = None,
    cache_dir: Path | None = None,
    source: str = "",
    progress: Callable[[int, int], None] | None = None,
) -> EmbeddingSource:
    """Embed a panel's rows.

    Args:
        panel: rows marked ``embedded`` are embedded.
        tokenizer: of the model.
        forward: the model.
        weights: hash of the weights (:func:`headrace.audit.stack.hash_weights`).
        stack: parts of the fingerprint (:func:`headrace.audit.stack.describe_stack`).
        template: prompt template; the panel's own text by default where there is some.
        config: pooling and batches.
        cache_dir: where vectors are kept, keyed by weights, template, pooling, layer and stack.
        source: words for the report.
        progress: is told (prompts done, prompts to do).
    """
    config = config or EmbedConfig()
    template = template or default_template(panel)
    cache = None
    if cache_dir is not None:
        key = {
            "weights": weights,
            "template": template,
            "pooling": config.pooling,
            "layer": str(config.layer),
            **{f"stack.{name}": value for name, value in stack.items()},
        }
        cache = VectorCache(cache_dir, key)
    vectors = embed_prompts(
        render_prompts(panel, template),
        tokenizer=tokenizer,
        forward=forward,
        config=config,
        cache=cache,
        progress=progress,
    )
    return EmbeddingSource(
        values=vectors,
        stack=dict(stack),
        source=source or "embedded from prompts",
        weights=weights,
        template=template,
        pooling=config.pooling,
        layer=config.layer,
    )
