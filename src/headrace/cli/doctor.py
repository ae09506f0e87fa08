"""``headrace doctor``: what works on this machine, what is missing, and how to install it."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from headrace.errors import EXIT_FAILED

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def doctor(
    *,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure/--no-measure", help="Time transfers and attention on each card (seconds)."
        ),
    ] = True,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Look at processor, memory limits, cards, kernels and versions.

    Names what is missing with the command that installs it, and versions with known faults.
    Changes nothing. Exits with 1 when something will fail or give wrong results.
    """
    from headrace import __version__
    from headrace.doctor.examine import examine
    from headrace.doctor.findings import render, summary, to_dict

    findings = examine(measure=measure)
    status = summary(findings)
    if json:
        from json import dumps

        result: dict[str, Any] = {
            "schema": 1,
            "headrace": __version__,
            "status": status,
            "findings": to_dict(findings),
        }
        typer.echo(dumps(result, indent=2, ensure_ascii=False))
    else:
        typer.echo(render(findings))
        typer.echo(f"\n{_CLOSING[status]}")
    if status == "faults":
        raise typer.Exit(EXIT_FAILED)


_CLOSING = {
    "ok": "Everything that was looked at works.",
    "warnings": "Works; the warnings above cost speed.",
    "faults": "Something will fail or give wrong results: see FAULT above.",
}
