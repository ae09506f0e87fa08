"""``headrace plan``: what a run needs and costs, before it is paid for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.errors import EXIT_WILL_NOT_FIT, ConfigError

if TYPE_CHECKING:
    from headrace.plan.job import Job
    from headrace.plan.machine import Machine
    from headrace.plan.source import ModelSource
    from headrace.trainer.config import TrainConfig

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def plan(
    *,
    config: Annotated[
        Path | None,
        typer.Argument(
            help="Training YAML to take model and batch from (headrace, axolotl or "
            "LLaMA-Factory keys).",
            show_default=False,
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="key=value pairs that replace keys of the file.", show_default=False),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Model folder, its config.json, or the name of a shipped configuration."),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(help="Card from the table, such as h200; this machine's by default."),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(min=1, help="Number of cards; 1, or this machine's.")
    ] = None,
    host_memory: Annotated[
        str | None, typer.Option(help="Memory of the host, such as 128GiB.")
    ] = None,
    disk: Annotated[
        str | None, typer.Option(help="Free disk for checkpoints, such as 2TB.")
    ] = None,
    cores: Annotated[int | None, typer.Option(min=1, help="Cores of the host.")] = None,
    update_rate: Annotated[
        float | None,
        typer.Option(help="Host optimizer rate, 10^9 parameters/s, as 'headrace bench' prints."),
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a sequence. [4096]")
    ] = None,
    micro_batch: Annotated[
        int | None, typer.Option(min=1, help="Sequences of a micro-batch. [1]")
    ] = None,
    tokens_per_step: Annotated[
        str | None, typer.Option(help="Tokens of the global batch, such as 64k. [32768]")
    ] = None,
    accumulation: Annotated[
        int | None,
        typer.Option(min=1, help="gradient_accumulation_steps to hold against FSDP. [1]"),
    ] = None,
    activations: Annotated[
        str | None, typer.Option(help="keep, offload or recompute; chosen by default.")
    ] = None,
    moments: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or 8bit. [float32]")
    ] = None,
    clipping: Annotated[
        str | None,
        typer.Option(help="auto, deferred, optimistic or off. [auto]"),
    ] = None,
    tokens: Annotated[str | None, typer.Option(help="Tokens to train on, such as 1B.")] = None,
    price: Annotated[float | None, typer.Option(min=0, help="Of one card and hour.")] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Every kind of bytes, lane and formula.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    list_models: Annotated[
        bool, typer.Option("--list-models", help="List the shipped configurations.")
    ] = False,
    list_gpus: Annotated[
        bool, typer.Option("--list-gpus", help="List the cards of the table.")
    ] = False,
) -> None:
    """Predict memory, speed, hours and money of a run. Loads no weights, uses no network.

    Says whether it fits, and the smallest change that makes it fit; what FSDP would need on the
    same cards. Exits with 3 when it will not fit.
    """
    from headrace.plan.job import Job
    from headrace.plan.predict import predict
    from headrace.plan.render import details, summary
    from headrace.plan.source import find_model

    if list_models or list_gpus:
        _list(models=list_models, gpus=list_gpus)
        return
    checked = None if config is None else _checked(config, overrides or [], model)
    machine = _machine(
        on_cpu=gpu is None and checked is not None and checked.device == "cpu",
        gpu=gpu,
        gpus=gpus,
        host_memory=host_memory,
        disk=disk,
        cores=cores,
        update_rate=update_rate,
    )
    options = {
        "max_length": max_length,
        "micro_batch": micro_batch,
        "tokens_per_step": tokens_per_step,
        "accumulation": accumulation,
        "activations": activations,
        "moments": moments,
        "clipping": clipping,
        "num_tokens": tokens,
        "price": price,
    }
    measured = ""
    if checked is not None and config is not None and gpu is None:
        from headrace.trainer.tuned_rates import with_tuned

        machine, measured = with_tuned(machine, config, checked.tune_file)
    if checked is not None:
        source, job, notes = _of_file(str(config), checked, machine, options)
    elif model is not None:
        source, job, notes = find_model(model), _changed(Job(), options), []
    else:
        raise ConfigError(
            "no model is named",
            remedy="give --model NAME_OR_FOLDER, or a YAML with model_name_or_path; "
            "'headrace plan --list-models' shows what is shipped",
        )
    result = predict(source, job, machine, notes=[*notes, measured] if measured else notes)
    if json:
        from json import dumps

        typer.echo(dumps(result.to_dict(), indent=2, ensure_ascii=False))
    else:
        typer.echo(details(result) if verbose else summary(result))
    if not result.fits:
        raise typer.Exit(EXIT_WILL_NOT_FIT)


def _list(*, models: bool, gpus: bool) -> None:
    if models:
        from headrace.plan.records import record_names

        typer.echo("\n".join(record_names()))
    if gpus:
        from headrace.plan.machine import card_names, find_card

        for name in card_names():
            card = find_card(name)[1]
            memory, origin = card["memory_gib"]
            typer.echo(f"{name:<12} {card['title']:<28} {memory:g} GiB ({origin})")


def _machine(
    *,
    on_cpu: bool,
    gpu: str | None,
    gpus: int | None,
    host_memory: str | None,
    disk: str | None,
    cores: int | None,
    update_rate: float | None,
) -> Machine:
    from headrace.plan.machine import Rate, describe_machine, detect_machine
    from headrace.store.host_memory import host_memory as read_host_memory
    from headrace.units import parse_memory

    memory = None
    if host_memory is not None:
        memory = Rate(value=float(parse_memory(host_memory, "--host-memory")), origin="given")
    given_disk = None
    if disk is not None:
        given_disk = Rate(value=float(parse_memory(disk, "--disk")), origin="given")
    if gpu is None:
        if memory is None:
            here = read_host_memory()
            limit = here.override or here.cgroup_limit or here.total
            memory = Rate(value=float(limit), origin="detected")
        found = detect_machine(update_gparams=update_rate, host_bytes=memory, on_cpu=on_cpu)
        if gpus is not None:
            if found.is_cpu:
                raise ConfigError(
                    f"--gpus {gpus}: this machine has no card that the driver lists",
                    remedy="name one with --gpu; 'headrace plan --list-gpus' shows the table",
                )
            found = replace(found, num_gpus=gpus)
        return found if given_disk is None else replace(found, disk_bytes=given_disk)
    return describe_machine(
        gpu=gpu,
        num_gpus=gpus or 1,
        host_bytes=memory,
        disk_bytes=given_disk,
        cores=cores,
        update_gparams=update_rate,
    )


def _checked(path: Path, overrides: list[str], model: str | None) -> TrainConfig:
    from headrace.trainer.planning import resolve_for_plan

    config, said = resolve_for_plan(path, overrides, model)
    for note in said:
        typer.echo(f"{path}: {note}", err=True)
    return config


def _of_file(
    path: str, config: TrainConfig, machine: Machine, options: dict[str, Any]
) -> tuple[ModelSource, Job, list[str]]:
    """Model and job of a training file, options of the command line first."""
    from headrace.plan.source import find_model, inline_model
    from headrace.plan.vocabulary import with_vocabulary
    from headrace.trainer.planning import plan_job, run_length

    named = config.model_name_or_path or config.scratch_config
    if isinstance(named, dict):
        sized, about = with_vocabulary(named, config.tokenizer_name_or_path)
        if about is not None:
            typer.echo(f"{path}: {about}", err=True)
        source = inline_model(path, sized)
    else:
        assert named is not None
        source = find_model(named)
    job = plan_job(config, source, num_gpus=machine.num_gpus, cpu=machine.is_cpu)
    job = _changed(job, options)
    num_tokens, kept, notes = run_length(config, job.tokens_per_step, job.num_tokens)
    return source, replace(job, num_tokens=num_tokens, num_checkpoints=kept), notes


def _changed(job: Job, options: dict[str, Any]) -> Job:
    """A job with what the command line says."""
    from typing import get_args

    from headrace.plan.job import Activations, Clipping, Moments
    from headrace.units import parse_count

    kinds = {"activations": Activations, "moments": Moments, "clipping": Clipping}
    for name, kind in kinds.items():
        if options[name] is not None and options[name] not in get_args(kind):
            raise ConfigError(
                f"--{name} is {options[name]!r}", remedy=f"one of: {', '.join(get_args(kind))}"
            )
    given = {name: value for name, value in options.items() if value is not None}
    for name in given.keys() & {"num_tokens", "tokens_per_step"}:
        given[name] = parse_count(given[name])
    return replace(job, **given)
