"""The datasets of a run: tokenised or streamed, split, and said.

The invariant: what is held out is never trained on. Decides no order and loads no weights.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from headrace.data.corpus_tokenizer import check_corpus_tokenizer
from headrace.data.evaluation import EvalSet
from headrace.data.loader import RowSet, TrainLoader
from headrace.data.stream_loader import StreamLoader
from headrace.data.streams import StreamedSet
from headrace.data.subsets import hold_out
from headrace.data.tokens import default_cache_dir, tokenise

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    import numpy.typing as npt

    from headrace.data.protocol import Loader
    from headrace.data.sampler import LoaderState
    from headrace.data.sources import DatasetSource
    from headrace.data.tokens import TokenStore
    from headrace.trainer.config import TrainConfig

    Ints = npt.NDArray[np.int64]
    Say = Callable[[str], None]


def open_data(
    config: TrainConfig,
    tokenizer: Any,
    vocab_size: int,
    say: Say,
    *,
    state: LoaderState | None = None,
    rank: int = 0,
    num_ranks: int = 1,
) -> tuple[Loader, list[EvalSet]]:
    """The loader of the datasets to train on, and datasets to evaluate on.

    Args:
        config: the run.
        tokenizer: may be ``None`` when every row is tokens.
        vocab_size: of the model.
        say: shows a line.
        state: where the loader goes on; the beginning by default.
        rank: which part of each step this process gets.
        num_ranks: that share a step.

    Raises:
        DataError: naming what cannot be used.
        ConfigError: nothing is left to train on, or weights are missing.
    """
    if tokenizer is not None:
        for source in (*config.datasets, *config.eval_datasets):
            check_corpus_tokenizer(source, tokenizer)
    settings = config.loader_settings(pad_token_id=_pad_token_id(tokenizer), num_ranks=num_ranks)
    seed = config.seed if config.data_seed is None else config.data_seed
    loader: Loader
    if config.streams:
        streams = [
            StreamedSet(
                source,
                tokenizer,
                config.row_settings(),
                vocab_size=vocab_size,
                seed=seed,
                number=number,
                shuffle=config.shuffle,
            )
            for number, source in enumerate(config.datasets)
        ]
        loader = StreamLoader(
            streams, settings, seed=seed, shuffle=config.shuffle, rank=rank, state=state
        )
        eval_sets: list[EvalSet] = []
    else:
        row_sets, eval_sets = _open_stores(config, tokenizer, vocab_size, say)
        loader = TrainLoader(
            row_sets, settings, seed=seed, shuffle=config.shuffle, rank=rank, state=state
        )
    for source in config.eval_datasets:
        store = _tokenise(config, source, tokenizer, vocab_size, say)
        found = EvalSet.open(store, config.row_settings(), label=source.label)
        say(
            f"evaluation: {source.label}: {store.num_documents:,} documents, "
            f"{found.num_tokens:,} tokens in {found.num_rows:,} rows"
        )
        eval_sets.append(found)
    return loader, eval_sets


def _open_stores(
    config: TrainConfig, tokenizer: Any, vocab_size: int, say: Say
) -> tuple[list[RowSet], list[EvalSet]]:
    """Datasets to train on, and what is held out of them."""
    stores = [_tokenise(config, source, tokenizer, vocab_size, say) for source in config.datasets]
    held: Sequence[tuple[Ints | None, Ints | None]] = [(None, None)] * len(stores)
    if config.val_set_size:
        held = hold_out(stores, config.val_set_size, config.seed)
    settings = config.row_settings()
    row_sets, eval_sets = [], []
    for source, store, (kept, out) in zip(config.datasets, stores, held, strict=True):
        rows = RowSet.open(
            store, settings, label=source.label, weight=source.weight, documents=kept
        )
        lost = rows.plan.num_dropped_tokens
        count = store.num_documents if kept is None else len(kept)
        sizes = f"{rows.plan.num_tokens:,} tokens in {rows.plan.num_rows:,} rows"
        said = [f"data: {source.label}: {count:,} documents", sizes]
        if lost:
            said.append(f"{lost:,} tokens left out")
        if store.num_unsupervised:
            said.append(f"{store.num_unsupervised:,} rows left out, which supervise nothing")
        if out is not None:
            said.append(f"{len(out):,} documents held out")
            eval_sets.append(
                EvalSet.open(store, settings, label=f"{source.label} held out", documents=out)
            )
        say(", ".join(said))
        row_sets.append(rows)
    return row_sets, eval_sets


def _pad_token_id(tokenizer: Any) -> int:
    for name in ("pad_token_id", "eos_token_id"):
        if getattr(tokenizer, name, None) is not None:
            return int(getattr(tokenizer, name))
    return 0


def _tokenise(
    config: TrainConfig, source: DatasetSource, tokenizer: Any, vocab_size: int, say: Say
) -> TokenStore:
    store = tokenise(
        source,
        tokenizer,
        cache_dir=config.data_cache_dir or default_cache_dir(),
        progress=_said_at_times(source.label, say),
        num_workers=config.dataset_num_proc,
    )
    store.check_vocabulary(vocab_size, source.label)
    return store


def _said_at_times(label: str, say: Say) -> Callable[[int, int], None]:
    """Says how far tokenising is, every ten seconds."""
    last = time.monotonic()

    def progress(num_documents: int, num_tokens: int) -> None:
        nonlocal last
        if time.monotonic() - last >= 10:
            last = time.monotonic()
            say(f"data: {label}: {num_documents:,} documents, {num_tokens:,} tokens so far")

    return progress
