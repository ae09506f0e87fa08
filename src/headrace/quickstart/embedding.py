"""Vectors of the panel's prompts, network by network, through the streaming engine.

One network is in memory at a time. Vectors are cached batch by batch, so a run that was cut
off goes on; the files hold the key and the stack that the audit checks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from headrace.audit import Panel

BATCH_SIZE = 256


@dataclass(frozen=True, kw_only=True)
class Network:
    """A model that reads the prompts.

    Attributes:
        name: in the audit, and of its file.
        folder: Hugging Face folder with weights and tokenizer.
        untrained: seed of fresh random weights to use instead: an untrained twin.
    """

    name: str
    folder: Path
    untrained: int | None = None


def embed_networks(
    panel: Panel,
    networks: Sequence[Network],
    *,
    out: Path,
    cache_dir: Path,
    say: Callable[[str], None],
) -> None:
    """Write ``out/NAME.parquet`` for each network.

    Args:
        panel: whose embedded rows have prompts.
        networks: models and twins.
        out: folder of the files.
        cache_dir: where vectors of a run that was cut off are found again.
        say: where progress goes.
    """
    from headrace.audit.embed import EmbedConfig, embed_panel  # noqa: PLC0415 (loads torch)
    from headrace.audit.vector_cache import write_vectors  # noqa: PLC0415 (as above)
    from headrace.cli._embedders import streaming_embedder  # noqa: PLC0415 (as above)

    config = EmbedConfig(batch_size=BATCH_SIZE)
    for number, network in enumerate(networks, start=1):
        say(f"network {number} of {len(networks)}: {network.name}")
        embedder = streaming_embedder(
            str(network.folder),
            layer=config.layer,
            device="cpu",
            dtype="bfloat16",
            untrained=network.untrained,
        )
        with embedder:
            source = embed_panel(
                panel,
                tokenizer=embedder.tokenizer,
                forward=embedder.forward,
                weights=embedder.weights,
                stack=embedder.stack,
                config=config,
                cache_dir=cache_dir,
                source=embedder.source,
            )
        key = source.file_key(panel.sha256())
        assert isinstance(source.values, np.ndarray)
        write_vectors(out / f"{network.name}.parquet", source.values, key)
