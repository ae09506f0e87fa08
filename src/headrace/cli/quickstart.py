"""``headrace quickstart``: corpus, training, audit and report on small real data."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def quickstart(
    *,
    output_dir: Annotated[
        Path,
        typer.Option(help="Work directory; the same command again goes on in it.", file_okay=False),
    ] = Path("headrace-quickstart"),
    model: Annotated[
        Path | None,
        typer.Option(
            help="Hugging Face folder, or a GGUF file, to continue from instead of training two "
            "small models from scratch. Takes longer, by the size of the model."
        ),
    ] = None,
    model_cutoff: Annotated[
        datetime | None,
        typer.Option(help="Knowledge cutoff of --model, if known.", formats=["%Y-%m-%d"]),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(help="Optimizer steps a model: 150, or 10 with --model.", min=1),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of everything random.", min=0)] = 0,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on stdout, progress on stderr.")
    ] = False,
) -> None:
    """Run the whole product on real data and end with a report.

    Presidential addresses since 1790 become a corpus cut at the end of 2006; a small model is
    trained on it, another on all of them; a panel of 20 stocks shows what each knows of the
    future. Two cores, no GPU, about eight minutes.
    """
    from json import dumps

    from rich.console import Console

    from headrace.errors import ConfigError
    from headrace.quickstart.panel import PanelConfig
    from headrace.quickstart.run import quickstart as run
    from headrace.quickstart.settings import LIGHT_PANEL, LIGHT_TWINS, QuickstartConfig
    from headrace.units import format_bytes, format_duration

    if model_cutoff is not None and model is None:
        raise ConfigError(
            "--model-cutoff says something of --model, which is not given",
            remedy="give --model too, or leave it out",
        )
    console = Console(stderr=json)
    config = QuickstartConfig(
        output_dir=output_dir,
        model=model,
        model_cutoff=None if model_cutoff is None else model_cutoff.date(),
        steps=steps,
        seed=seed,
        panel=PanelConfig() if model is None else LIGHT_PANEL,
        num_twins=5 if model is None else LIGHT_TWINS,
    )
    try:
        result = run(config, console)
    except KeyboardInterrupt as stopped:
        typer.echo(
            "headrace quickstart: interrupted; the same command goes on from there", err=True
        )
        raise typer.Exit(getattr(stopped, "exit_code", 130)) from None
    if json:
        print(dumps(result.to_json(), ensure_ascii=False))
        return
    print(f"\n{result.headline}")
    for name, verdict in result.verdicts.items():
        print(f"  {name}: {verdict}")
    took, peak = format_duration(result.seconds), format_bytes(result.peak_rss_bytes)
    print(f"{took}, peak memory {peak}")
    print(f"report: {result.report}")
