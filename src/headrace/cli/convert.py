"""``headrace convert``: the command line of :mod:`headrace.trainer.convert`."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, rich_markup_mode=None)


class Target(StrEnum):
    """What is written."""

    MODEL = "model"
    CHECKPOINT = "checkpoint"


class Dtype(StrEnum):
    """Types of weights."""

    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


@app.command()
def convert(
    source: Annotated[
        Path,
        typer.Argument(
            help="Folder of .distcp shards, a checkpoint that holds such folders "
            "(pytorch_model_fsdp_0, optimizer_0), or a run folder."
        ),
    ],
    out: Annotated[Path, typer.Argument(help="A new model folder, or the output_dir of a run.")],
    *,
    to: Annotated[
        Target,
        typer.Option(
            help="model: a Hugging Face folder. checkpoint: OUT/checkpoint-N with the optimizer's "
            "state, from which training goes on."
        ),
    ] = Target.MODEL,
    model: Annotated[
        str | None,
        typer.Option(help="Folder with the model's config.json and tokenizer, if not beside it."),
    ] = None,
    dtype: Annotated[
        Dtype | None, typer.Option(help="Of the weights; those of the source by default.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Merge sharded FSDP checkpoints of torch or axolotl, in one process.

    Needs memory for one layer, no GPU and no process group. No pickle is run.
    """
    from headrace.errors import ConfigError
    from headrace.trainer.convert import convert_to_model
    from headrace.trainer.convert_state import convert_to_checkpoint
    from headrace.units import format_bytes

    if to is Target.MODEL:
        result = convert_to_model(source, out, model=model, dtype=dtype)
    elif dtype is Dtype.FLOAT16:
        raise ConfigError(
            "--dtype float16: a checkpoint holds bfloat16 or float32 working weights",
            remedy="--dtype bfloat16, or --to model",
        )
    else:
        result = convert_to_checkpoint(
            source, out, model=model, dtype="float32" if dtype is Dtype.FLOAT32 else "bfloat16"
        )
    if as_json:
        print(json.dumps(vars(result), default=str))
        return
    for note in result.notes:
        print(f"note: {note}")
    print(
        f"converted {result.source} to {result.folder}: {result.num_tensors} tensors in "
        f"{result.dtype}, {format_bytes(result.num_bytes)}"
        + ("" if result.step is None else f", optimizer after step {result.step}")
    )
