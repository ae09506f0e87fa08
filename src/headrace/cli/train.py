"""``headrace train``: the command line of :func:`headrace.trainer.train`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.interrupts import end_of

if TYPE_CHECKING:
    from headrace.trainer.config import TrainConfig

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def train(
    config: Annotated[
        Path | None, typer.Argument(help="YAML file; keys as in transformers' TrainingArguments.")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="key=value pairs that replace keys of the file; dotted keys go deeper."
        ),
    ] = None,
    *,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object; progress goes to stderr.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the configuration, print what it sets, stop.")
    ] = False,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Write a Chrome trace of the last steps here: what each lane did when. The same "
            "as engine.trace=FILE."
        ),
    ] = None,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of the file and stop.")
    ] = False,
) -> None:
    """Train all weights of a model as CONFIG says.

    Stop with Ctrl-C: the step is finished and saved, and resume_from_checkpoint=auto goes on.
    """
    from headrace.errors import ConfigError
    from headrace.parallel.launch import place_of
    from headrace.trainer.config import resolve

    is_main = place_of().rank == 0
    if schema and not is_main:
        return
    if schema:
        from headrace.trainer.schema import json_schema

        print(json.dumps(json_schema(), indent=1))
        return
    if config is None:
        raise ConfigError(
            "headrace train needs a configuration file",
            remedy="headrace train CONFIG.yaml; recipes/ has some to start from",
        )
    if trace is not None:
        overrides = [*(overrides or []), f"engine.trace={json.dumps(str(trace))}"]
    if dry_run and not is_main:
        return
    if dry_run:
        from headrace.trainer.absent import absent

        resolved, notes = resolve(config, overrides or [])
        missing = absent(resolved)
        if as_json:
            shown = {"config": resolved.to_dict(), "notes": notes, "absent": missing}
            print(json.dumps(shown))
        else:
            _print_checked(resolved, [*notes, *(f"not on this machine: {one}" for one in missing)])
        return

    try:
        from rich.console import Console

        from headrace.trainer.run import train as run

        result = run(config, overrides or [], console=Console(stderr=as_json))
    except KeyboardInterrupt as stopped:
        message, exit_code = end_of(stopped)
        typer.echo(f"headrace train: {message}", err=True)
        raise typer.Exit(exit_code) from None
    if as_json and is_main:
        print(json.dumps(vars(result), default=str))
    raise typer.Exit(result.exit_code)


def _print_checked(config: TrainConfig, notes: list[str]) -> None:
    """What was translated and every key that has not its default; itself a file to train with."""
    import yaml

    chosen = config.chosen()
    rest = len(config.to_dict()) - len(chosen)
    print("".join(f"# {note}\n" for note in notes), end="")
    print(yaml.safe_dump(chosen, sort_keys=False, allow_unicode=True, width=100), end="")
    print(f"# {rest} other keys have their defaults; --json prints them")
