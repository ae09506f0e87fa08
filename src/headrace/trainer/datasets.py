"""The datasets of a run: tokenised, split, and said.

The invariant: what is held out is never trained on. Decides no order and loads no weights.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from headrace.data.evaluation import EvalSet
from headrace.data.loader import RowSet
from headrace.data.subsets import hold_out
from headrace.data.tokens import default_cache_dir, tokenise

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    import numpy.typing as npt

    from headrace.data.sources import DatasetSource
    from headrace.data.tokens import TokenStore
    from headrace.trainer.config import TrainConfig

    Ints = npt.NDArray[np.int64]
    Say = Callable[[str], None]


def open_data(
    config: TrainConfig, tokenizer: Any, vocab_size: int, say: Say
) -> tuple[list[RowSet], list[EvalSet]]:
    """Datasets to train on and to evaluate on.

    Args:
        config: the run.
        tokenizer: may be ``None`` when every row is tokens.
        vocab_size: of the model.
        say: shows a line.

    Raises:
        DataError: naming what cannot be used.
        ConfigError: nothing is left to train on.
    """
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
    for source in config.eval_datasets:
        store = _tokenise(config, source, tokenizer, vocab_size, say)
        found = EvalSet.open(store, settings, label=source.label)
        say(
            f"evaluation: {source.label}: {store.num_documents:,} documents, "
            f"{found.num_tokens:,} tokens in {found.num_rows:,} rows"
        )
        eval_sets.append(found)
    return row_sets, eval_sets


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
