"""``headrace export``: the command line of :func:`headrace.trainer.export.export_checkpoint`."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, rich_markup_mode=None)


class Dtype(StrEnum):
    """Types of weights."""

    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"


@app.command()
def export(
    source: Annotated[
        Path, typer.Argument(help="A checkpoint-N folder, or the output_dir of a run.")
    ],
    out: Annotated[Path, typer.Argument(help="A new folder for the model.")],
    *,
    merge: Annotated[
        bool, typer.Option("--merge", help="Add the adapters of a LoRA run to its model.")
    ] = False,
    base: Annotated[
        Path | None,
        typer.Option("--base", help="With --merge: the run's model, if it has moved."),
    ] = None,
    dtype: Annotated[
        Dtype | None,
        typer.Option(
            help="Of the weights: float32 gives the master weights; the run's by default."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Write a checkpoint as a Hugging Face model folder.

    AutoModelForCausalLM.from_pretrained loads it; optimizer state stays behind. Of a LoRA run it
    is the adapter, for PeftModel.from_pretrained, unless --merge is given.
    """
    from headrace.errors import ConfigError
    from headrace.trainer.export import export_checkpoint, export_merged
    from headrace.trainer.export_dtype import export_as
    from headrace.units import format_bytes

    if base is not None and not merge:
        raise ConfigError("--base has no effect without --merge", remedy="add --merge")
    if dtype is not None:
        if merge:
            raise ConfigError("--dtype: merged adapters have the run's type", remedy="leave it out")
        result = export_as(source, out, dtype="float32" if dtype is Dtype.FLOAT32 else "bfloat16")
    else:
        result = export_merged(source, out, base=base) if merge else export_checkpoint(source, out)
    if as_json:
        print(json.dumps(vars(result), default=str))
    else:
        print(
            f"exported {result.checkpoint} to {result.folder}: {len(result.files)} files, "
            f"{format_bytes(result.num_bytes)}"
        )
