"""``headrace bench``: measured figures, each with the ceiling that the same run found."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(
    help="Measured figures with the ceilings of the same run.",
    no_args_is_help=True,
    add_completion=False,
)


@app.callback()
def _bench() -> None:
    """Measured figures with the ceilings of the same run."""


@app.command()
def update(
    num_parameters: Annotated[
        str, typer.Option(help="Parameters to update; 32 bytes of memory each.")
    ] = "100M",
    threads: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Threads; by default all processors.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds.")] = 9,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """AdamW on the host: against torch's fused AdamW with casts, and the memory's best rate."""
    import dataclasses
    import json as json_module

    from headrace.bench.update import describe, measure_update
    from headrace.units import parse_count

    figures = measure_update(
        num_parameters=parse_count(num_parameters), num_threads=threads, num_rounds=rounds
    )
    if json:
        record = {"benchmark": "update", **dataclasses.asdict(figures)}
        print(json_module.dumps(record, indent=2))
    else:
        print(describe(figures))
