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

_REPLACED = ("deepspeed", "fsdp", "fsdp_config", "fsdp_version", "fsdp_final_state_dict_type")

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
        str | None, typer.Option(help="keep or recompute; chosen by default.")
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
    from headrace.plan.predict import predict
    from headrace.plan.render import render
    from headrace.plan.source import find_model, inline_model
    from headrace.plan.vocabulary import with_vocabulary

    if list_models or list_gpus:
        _list(models=list_models, gpus=list_gpus)
        return
    settings: dict[str, Any] = {}
    if config is not None:
        from headrace.trainer.aliases import translate
        from headrace.trainer.config_file import read_yaml

        given = read_yaml(config)
        # What a plan does without; headrace train wants these emptied.
        replaced = [key for key in _REPLACED if given.pop(key, None)]
        settings, notes = translate(given)
        notes += [f"{key} -> not looked at (headrace replaces it)" for key in replaced]
        for note in notes:
            typer.echo(f"{config}: {note}", err=True)
    named = model or settings.get("model_name_or_path") or settings.get("model_config")
    if not isinstance(named, (str, dict)):
        raise ConfigError(
            "no model is named",
            remedy="give --model NAME_OR_FOLDER, or a YAML with model_name_or_path; "
            "'headrace plan --list-models' shows what is shipped",
        )
    machine = _machine(
        gpu=gpu,
        gpus=gpus,
        host_memory=host_memory,
        disk=disk,
        cores=cores,
        update_rate=update_rate,
    )
    job = _job(
        settings,
        machine.num_gpus,
        max_length=max_length,
        micro_batch=micro_batch,
        tokens_per_step=tokens_per_step,
        accumulation=accumulation,
        activations=activations,
        moments=moments,
        clipping=clipping,
        tokens=tokens,
        price=price,
    )
    if isinstance(named, str):
        source = find_model(named)
    else:
        sized, said = with_vocabulary(named, settings.get("tokenizer_name_or_path"))
        if said is not None:
            typer.echo(f"{config}: {said}", err=True)
        source = inline_model(str(config), sized)
    result = predict(source, job, machine)
    if json:
        from json import dumps

        typer.echo(dumps(result.to_dict(), indent=2, ensure_ascii=False))
    else:
        typer.echo(render(result))
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
    gpu: str | None,
    gpus: int | None,
    host_memory: str | None,
    disk: str | None,
    cores: int | None,
    update_rate: float | None,
) -> Machine:
    from headrace.plan.machine import Rate, describe_machine, detect_machine
    from headrace.store.host_memory import host_memory as read_host_memory
    from headrace.units import parse_bytes

    memory = None
    if host_memory is not None:
        memory = Rate(value=float(parse_bytes(host_memory)), origin="given")
    given_disk = None if disk is None else Rate(value=float(parse_bytes(disk)), origin="given")
    if gpu is None:
        if memory is None:
            here = read_host_memory()
            limit = here.override or here.cgroup_limit or here.total
            memory = Rate(value=float(limit), origin="detected")
        found = detect_machine(update_gparams=update_rate, host_bytes=memory)
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


def _job(settings: dict[str, Any], num_gpus: int, **options: Any) -> Job:
    """The job of a YAML's settings, options of the command line first."""
    from typing import get_args

    from headrace.plan.job import Activations, Clipping, Job, Moments
    from headrace.units import parse_count

    kinds = {"activations": Activations, "moments": Moments, "clipping": Clipping}
    for name, kind in kinds.items():
        if options[name] is not None and options[name] not in get_args(kind):
            raise ConfigError(
                f"--{name} is {options[name]!r}", remedy=f"one of: {', '.join(get_args(kind))}"
            )
    values: dict[str, Any] = {}
    if settings:
        values = _sizes(settings, num_gpus)
    renamed = {"tokens": "num_tokens"}
    for name, value in options.items():
        if value is not None:
            counted = parse_count(value) if name in {"tokens", "tokens_per_step"} else value
            values[renamed.get(name, name)] = counted
    return Job(**{name: value for name, value in values.items() if value is not None})


def _sizes(settings: dict[str, Any], num_gpus: int) -> dict[str, Any]:
    """The parts of a job that a YAML says, with the trainer's own defaults where it is silent."""
    rows = _number(settings, "per_device_train_batch_size", 8)
    steps = _number(settings, "gradient_accumulation_steps", 1)
    length = _number(settings, "max_length", 1024, least=2)
    engine = settings.get("engine") or {}
    if not isinstance(engine, dict):
        raise ConfigError(f"engine is {engine!r}", remedy="write engine: {key: value}")
    clips = settings.get("max_grad_norm", 1.0) not in (None, 0, 0.0)
    micro_batches = rows * steps * length * num_gpus
    values: dict[str, Any] = {
        "max_length": length,
        "micro_batch": rows,
        "tokens_per_step": micro_batches,
        "accumulation": steps,
        "dtype": settings.get("dtype", "bfloat16"),
        "clipping": engine.get("clipping") if clips else "off",
        "num_checkpoints": _number(settings, "save_total_limit", 1),
        "activations": engine.get("activations"),
        "async_save": bool(settings.get("async_save", True)),
    }
    if engine.get("micro_batches_per_wave") is not None:
        a_wave = _number(engine, "micro_batches_per_wave", 1)
        values["waves"] = max(1, -(-steps // a_wave))
    for key in ("weight_slots", "gradient_slots", "loss_chunk_tokens"):
        if engine.get(key) is not None:
            values[key] = _number(engine, key, 1)
    if settings.get("adapter") == "lora":
        values["lora_rank"] = _number(settings, "lora_r", 8)
    if settings.get("max_steps") not in (None, -1):
        values["num_tokens"] = _number(settings, "max_steps", 1) * micro_batches
    return values


def _number(settings: dict[str, Any], key: str, default: int, *, least: int = 1) -> int:
    """A whole number of a YAML; text that is one counts, as it does for ``headrace train``."""
    value = settings.get(key)
    if value is None:
        return default
    try:
        number = None if isinstance(value, bool) else int(value)
    except (TypeError, ValueError, OverflowError):
        number = None
    if number is None or number < least or (isinstance(value, float) and value != number):
        raise ConfigError(f"{key} is {value!r}", remedy=f"a whole number, {least} or more")
    return number
