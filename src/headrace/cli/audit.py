"""``headrace audit``: what each model knows of the future, from a panel and embeddings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_PAIR = "May be given several times."


@app.command()
def audit(
    recipe: Annotated[
        Path | None, typer.Argument(help="YAML recipe instead of --panel and --embeddings.")
    ] = None,
    *,
    panel: Annotated[
        Path | None,
        typer.Option(
            help="Parquet or CSV with columns entity, date, label_start, label_end, y, any "
            "numeric features, and optionally embedded (rows that have a vector).",
        ),
    ] = None,
    embeddings: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=FILE", help=f"A model's vectors, .npy or from embed. {_PAIR}"),
    ] = None,
    cutoff: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=DATE", help=f"Knowledge cutoff of a model. {_PAIR}"),
    ] = None,
    twin: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=FILE", help=f"Vectors of an untrained network. {_PAIR}"),
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(help="Model known to be of its time, to compare with instead of twins."),
    ] = None,
    reduction: Annotated[
        list[str] | None,
        typer.Option(metavar="BASE=TRAINED", help=f"Pair of models to compare. {_PAIR}"),
    ] = None,
    recall: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=FILE", help=f"Recall answers, of headrace probe. {_PAIR}"),
    ] = None,
    perplexity: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=FILE", help=f"Document losses, of headrace probe. {_PAIR}"),
    ] = None,
    split_date: Annotated[
        str | None, typer.Option(help="Last training date of the chronological arm.")
    ] = None,
    shifts: Annotated[int, typer.Option(help="Shifted-date draws.")] = 199,
    entity_folds: Annotated[int, typer.Option(help="Folds of disjoint entities.")] = 5,
    tables: Annotated[
        bool, typer.Option(help="Walk-forward, embargo and evaluation-leakage tables.")
    ] = True,
    allow_mixed_stacks: Annotated[
        bool, typer.Option(help="Compare embeddings of different inference stacks, marked.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the offsets and projections.")] = 0,
    json: Annotated[
        str | None, typer.Option(metavar="OUT", help="Write the result here; '-' is stdout.")
    ] = None,
) -> None:
    """Judge each model: too_little_data, not_identified, no_detectable_skill, skill or
    knows_the_future.

    Vectors are matched to the panel's rows (or to those marked embedded) by position. A model
    that has no --cutoff, or no dates after it, is not_identified.
    """  # noqa: D205  # typer prints the first paragraph as it stands
    import sys
    from json import dumps

    from headrace.audit import AuditConfig, read_panel, to_dict, write_json
    from headrace.audit.codec import check_writable
    from headrace.audit.perplexity import read_losses
    from headrace.audit.recall import read_answers
    from headrace.audit.recipe import request_from_recipe
    from headrace.audit.request import AuditRequest, file_sources, model_pairs, pairs
    from headrace.errors import ConfigError

    if json is not None and json != "-":
        check_writable(Path(json))
    if recipe is not None:
        given = [
            panel, embeddings, cutoff, twin, reference, reduction, recall, perplexity, split_date,
        ]  # fmt: skip
        if any(option is not None for option in given):
            raise ConfigError(
                "a recipe was given, and options that it would silence",
                remedy="put them into the recipe, or leave the recipe out",
            )
        request = request_from_recipe(recipe)
    elif panel is None:
        raise ConfigError("no panel was given", remedy="give --panel PANEL.parquet or a recipe")
    else:
        sources = file_sources(embeddings or (), "--embeddings")
        losses = {}
        for name, file in pairs(perplexity or (), "--perplexity").items():
            stack = sources[name].fingerprint if name in sources else ""
            losses[name] = read_losses(Path(file), stack=stack)
        request = AuditRequest(
            panel=read_panel(panel),
            embeddings=sources,
            cutoffs=pairs(cutoff or (), "--cutoff"),
            twins=file_sources(twin or (), "--twin"),
            reference=reference,
            recall={
                name: read_answers(Path(file))
                for name, file in pairs(recall or (), "--recall").items()
            },
            perplexity=losses,
            reductions=model_pairs(reduction or (), "--reduction"),
            config=AuditConfig(
                split_date=split_date,
                num_shifts=shifts,
                entity_folds=entity_folds,
                tables=tables,
                allow_mixed_stacks=allow_mixed_stacks,
                seed=seed,
            ),
        )
    result = request.run(progress=lambda text: print(text, file=sys.stderr, flush=True))
    if json == "-":
        print(dumps(to_dict(result), ensure_ascii=False, allow_nan=False))
        return
    for warning in result.warnings:
        print(f"note: {warning}")
    for model in result.models:
        print(f"{model.name}: {model.verdict}")
        for sentence in (*model.summary, *model.cautions):
            print(f"  {sentence}")
    for pair in result.reductions:
        print(f"{pair.base} minus {pair.trained}:")
        for what, figure in pair.figures():
            print(f"  {what}: {figure.written()}")
    for what, figure in result.slope.items():
        print(f"change a year of knowledge cutoff, {what}: {figure.written()}")
    for control in result.controls:
        found = "was found"
        if not control.detected:
            found = "was NOT found: that none was found in a model says nothing of such leaks"
        print(
            f"positive control at {control.cutoff}: a planted leak of {control.planted_share:g} "
            f"a channel {found}"
        )
    if json is not None:
        write_json(result, Path(json))
        print(f"result: {json}")
