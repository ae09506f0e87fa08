"""Giving the corpus its tokenizer: adopted as it is, or trained on what the cutoff allows."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from headrace.corpus.files import file_sha256, hash_of, is_whole, whole_folder
from headrace.corpus.tokenizer import (
    TRAINING_VERSION,
    TokenizerInfo,
    adopt_tokenizer,
    describe_folder,
    find_tokenizer_file,
    train_tokenizer,
)
from headrace.corpus.unit_files import document_bytes, row_groups

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from headrace.corpus.config import CorpusConfig
    from headrace.corpus.cutoff import Cutoff
    from headrace.corpus.duplicates import IndexedUnit
    from headrace.corpus.plan import Plan
    from headrace.corpus.selection import Selector

_FIRST_VINTAGE = np.uint64(1)


def make_tokenizer(
    config: CorpusConfig,
    plan: Plan,
    units: list[IndexedUnit],
    selector: Selector,
    earliest: Cutoff,
) -> TokenizerInfo | None:
    """The tokenizer's folder among the work, made unless it is there; ``None`` without one."""
    settings = config.tokenizer
    if settings is None:
        return None
    if settings.path is not None:
        file = find_tokenizer_file(settings.path)
        siblings = {p.name: file_sha256(p) for p in sorted(file.parent.glob("*.json"))}
        key = hash_of(["given", file_sha256(file), siblings, settings.eos_token])
        place = plan.tokenizer_place(key)
        origin = "given; its vocabulary's vintage is not known to this build"
        if not is_whole(place):
            with whole_folder(place) as folder:
                adopt_tokenizer(settings, folder)
        return describe_folder(place, origin=origin)
    chosen = _training_rows(config, units, selector)
    digest = hashlib.sha256()
    for unit, rows in zip(units, chosen, strict=True):
        digest.update(unit.place.name.encode() + np.packbits(rows).tobytes())
    key = hash_of(
        ["trained", TRAINING_VERSION, settings.model_dump(mode="json"), digest.hexdigest()]
    )
    place = plan.tokenizer_place(key)
    num_documents = sum(int(rows.sum()) for rows in chosen)
    origin = (
        f"byte-level BPE trained on {num_documents} documents available by {earliest.given}, "
        "the earliest cutoff"
    )
    if not is_whole(place):
        with whole_folder(place) as folder:
            train_tokenizer(settings, _texts(units, chosen), folder, origin=origin)
    return describe_folder(place, origin=origin)


def _training_rows(
    config: CorpusConfig, units: list[IndexedUnit], selector: Selector
) -> list[NDArray[np.bool_]]:
    """Documents of the earliest vintage up to ``train_bytes``, spread like a token budget."""
    assert config.tokenizer is not None

    thresholds = selector.thresholds(
        config.tokenizer.train_bytes, lambda number: document_bytes(units[number].place), None
    )
    return [
        (selector.sampled_masks(number, thresholds) & _FIRST_VINTAGE) != 0
        for number in range(len(units))
    ]


def _texts(units: list[IndexedUnit], chosen: list[NDArray[np.bool_]]) -> Iterator[str]:
    for unit, rows in zip(units, chosen, strict=True):
        for first, batch in row_groups(unit.place / "documents.parquet", ["text"]):
            wanted = np.flatnonzero(rows[first : first + batch.num_rows])
            yield from batch.column(0).take(pa.array(wanted)).to_pylist()
