"""``headrace report``: one HTML file and one JSON file from result records."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def report(
    *,
    out: Annotated[Path, typer.Option(help="HTML file to write.", dir_okay=False)] = Path(
        "report.html"
    ),
    corpus: Annotated[
        list[Path] | None,
        typer.Option(help="Corpus folder with a manifest.json. May be given several times."),
    ] = None,
    run: Annotated[
        list[Path] | None,
        typer.Option(help="Training run folder with a run.json. May be given several times."),
    ] = None,
    audit: Annotated[
        Path | None, typer.Option(help="Result of headrace audit.", dir_okay=False)
    ] = None,
    title: Annotated[str, typer.Option(help="Title over the headline.")] = "Point-in-time report",
    json: Annotated[
        str | None,
        typer.Option(help="Also write the report as JSON to this file; '-' is stdout."),
    ] = None,
) -> None:
    """Write one self-contained HTML report from result records.

    Any of --corpus, --run and --audit may be left out: the report then says what it does not
    show. The HTML needs no network, follows the reader's light or dark setting, and prints.
    """
    import sys
    from json import dumps

    from headrace.report.render import write_report

    to_stdout = json == "-"
    data = write_report(
        out=out,
        json_out=None if json is None or to_stdout else Path(json),
        corpora=corpus or (),
        runs=run or (),
        audit=audit,
        title=title,
    )
    if to_stdout:
        print(dumps(data, ensure_ascii=False, allow_nan=False))
    else:
        print(data["headline"])
        for model in data["models"]:
            print(f"  {model['name']}: {model['verdict']}")
    print(f"report: {out}", file=sys.stderr if to_stdout else sys.stdout)
