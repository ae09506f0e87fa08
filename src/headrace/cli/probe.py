"""``headrace probe``: what a model states of dated moves, and where its text ends."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_MODEL = typer.Option(help="Hugging Face folder or name of a causal LM.")
_DEVICE = typer.Option(help="Torch device.")


@app.command()
def recall(
    *,
    panel: Annotated[Path, typer.Option(help="Panel file or an audit's YAML recipe.")],
    model: Annotated[str, _MODEL],
    market: Annotated[
        str, typer.Option(help="As the prompt names it: 'the Japanese stock market'.")
    ],
    out: Annotated[Path, typer.Option(help="CSV to write: date, stated, true.")],
    device: Annotated[str, _DEVICE] = "cpu",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Ask whether the market closed higher or lower on each date of a panel.

    The date asked about is the end of the label, the truth the mean of the panel's targets.
    """
    from json import dumps

    import numpy as np
    import polars as pl

    from headrace.audit import read_panel
    from headrace.audit.recall import stated_moves
    from headrace.audit.recipe import panel_from_recipe
    from headrace.cli._embedders import load_whole

    is_recipe = panel.suffix in {".yaml", ".yml"}
    rows = panel_from_recipe(panel)[0] if is_recipe else read_panel(panel)
    loaded, tokenizer = load_whole(model, device=device)
    true = np.bincount(rows.session, rows.y) / np.bincount(rows.session)
    ends = np.zeros(rows.num_sessions, dtype=np.int64)
    np.maximum.at(ends, rows.session, rows.label_end.astype(np.int64))
    dates = ends.astype("datetime64[us]").astype("datetime64[D]")
    _, first = np.unique(dates, return_index=True)
    texts = [str(date) for date in dates[first]]
    stated = stated_moves(loaded, tokenizer, texts, market=market)
    out.parent.mkdir(parents=True, exist_ok=True)
    pl.DataFrame({"date": texts, "stated": stated, "true": true[first]}).write_csv(out)
    if json:
        print(dumps({"out": str(out), "num_dates": len(texts)}))
    else:
        print(f"{len(texts)} answers in {out}")


@app.command()
def loss(
    *,
    corpus: Annotated[Path, typer.Option(help="Corpus folder (its tokens are of this model).")],
    model: Annotated[str, _MODEL],
    out: Annotated[Path, typer.Option(help="CSV to write: date, loss_sum, num_tokens.")],
    max_length: Annotated[int, typer.Option(help="Positions a forward pass.")] = 1024,
    device: Annotated[str, _DEVICE] = "cpu",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Loss of every document of a corpus, by the date it was available."""
    from json import dumps

    import polars as pl

    from headrace.audit.perplexity import document_losses
    from headrace.cli._embedders import load_whole
    from headrace.errors import DataError

    shards = sorted((corpus / "tokens").glob("*.parquet"))
    if not shards:
        raise DataError(
            f"no token shards in {corpus / 'tokens'}", remedy="build it with headrace corpus build"
        )
    loaded, _ = load_whole(model, device=device)
    vocabulary = loaded.config.vocab_size

    def documents() -> object:
        for shard in shards:
            frame = pl.read_parquet(shard, columns=["available_at", "input_ids"])
            for date, ids in frame.iter_rows():
                if ids and max(ids) >= vocabulary:
                    raise DataError(
                        f"{shard} holds token {max(ids)}, the model has {vocabulary}: its tokens "
                        "are of another tokenizer",
                        remedy="encode the corpus with the model's own tokenizer",
                    )
                yield str(date)[:10], list(ids)

    found = list(document_losses(loaded, documents(), max_length=max_length))  # type: ignore[arg-type]  # a generator
    out.parent.mkdir(parents=True, exist_ok=True)
    columns = ("date", "loss_sum", "num_tokens")
    pl.DataFrame(found, schema=list(columns), orient="row").write_csv(out)
    if json:
        print(dumps({"out": str(out), "num_documents": len(found)}))
    else:
        print(f"{len(found)} documents in {out}")
