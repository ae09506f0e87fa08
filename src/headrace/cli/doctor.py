"""``headrace doctor``: what works on this machine, what is missing, and how to install it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.errors import EXIT_FAILED, ConfigError

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
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="NAME_OR_FOLDER",
            help="Test a model instead: a folder, a config.json, or a name in the hub cache.",
        ),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="With --model: test again what was tested before.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Look at processor, memory limits, cards, kernels and versions.

    Names what is missing with the command that installs it, and versions with known faults. With
    --model, says whether a model trains exactly: a tiny twin of its class, with its switches, is
    compared with plain autograd. Needs its config.json, no weights. Changes nothing. Exits with 1
    when something will fail or give wrong results.
    """
    if model is not None:
        _doctor_model(model, fresh=fresh, json=json)
        return
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


def _doctor_model(name: str, *, fresh: bool, json: bool) -> None:
    from headrace.models.nearby import check_there

    check_there(name, needed="config.json")  # before torch is loaded
    from headrace.models.building import load_config
    from headrace.selftest import Verdict, run_selftest
    from headrace.selftest.verdict import current_versions

    try:
        config = load_config(name)
    except ConfigError as error:
        if not (Path(name).is_file() or (Path(name) / "config.json").is_file()):
            raise  # a name that means nothing
        # There is a model, and transformers cannot read it: that is the verdict.
        verdict = Verdict(verdict="refused", reason=error.message, versions=current_versions())
    else:
        import torch

        # Where it would be compiled.
        compiled = torch.cuda.is_available()
        verdict = run_selftest(config, use_cache=not fresh, compiled=compiled)
    if json:
        from json import dumps

        typer.echo(dumps({"model": name, **verdict.to_dict()}, indent=2, ensure_ascii=False))
    else:
        typer.echo(f"{name}: {verdict.architecture or verdict.model_type}: {verdict.verdict}")
        if verdict.reason is not None:
            typer.echo(f"  {verdict.reason}")
        else:
            typer.echo(
                f"  gradients within {verdict.gradient_error:.1e} of plain autograd (worst: "
                f"{verdict.worst_parameter}), packed documents within {verdict.packing_leak:.1e} "
                "of isolated, export and reload equal"
            )
    if verdict.verdict != "ok":
        raise typer.Exit(EXIT_FAILED)


_CLOSING = {
    "ok": "Everything that was looked at works.",
    "warnings": "Works; the warnings above cost speed.",
    "faults": "Something will fail or give wrong results: see FAULT above.",
}
