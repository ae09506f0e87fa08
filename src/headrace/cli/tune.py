"""``headrace tune``: the command line of :func:`headrace.trainer.tuning.tune`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def tune(
    config: Annotated[Path, typer.Argument(help="YAML file of the run.", show_default=False)],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="key=value pairs, those that headrace train will be given."),
    ] = None,
    *,
    output: Annotated[
        Path | None,
        typer.Option(help="File for the choice; CONFIG.tune.yaml beside CONFIG.yaml by default."),
    ] = None,
    steps: Annotated[
        int,
        typer.Option(min=0, help="Steps to time of each of the best few; 0 trusts the prediction."),
    ] = 0,
    candidates: Annotated[int, typer.Option(min=1, help="How many to compare at most.")] = 3,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object; progress goes to stderr.")
    ] = False,
) -> None:
    """Choose the engine settings that CONFIG leaves open, by measuring this machine.

    Takes seconds, and with --steps as long as those steps. headrace train uses the file while
    machine, model, workload, settings and versions are the same, and says so. Exits with 3 when
    nothing fits.
    """
    from headrace.trainer.tuning import tune as run

    result = run(
        config,
        overrides or [],
        output=output,
        steps=steps,
        num_candidates=candidates,
        say=lambda text: typer.echo(text, err=as_json),
    )
    if as_json:
        typer.echo(json.dumps(result.to_dict(), indent=2))
