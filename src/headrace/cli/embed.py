"""``headrace embed``: vectors of a panel's prompts, with the fingerprint of what made them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def embed(
    *,
    panel: Annotated[
        Path,
        typer.Option(
            help="Panel file, or the YAML recipe of an audit, whose embedded rows are embedded."
        ),
    ],
    model: Annotated[str, typer.Option(help="Hugging Face folder or name of a causal LM.")],
    out: Annotated[Path, typer.Option(help="Parquet file to write, one vector a row.")],
    template: Annotated[
        str | None, typer.Option(help="Prompt template; the panel's own text if it has some.")
    ] = None,
    pooling: Annotated[str, typer.Option(help="last_token or mean.")] = "last_token",
    layer: Annotated[int, typer.Option(help="As hidden_states counts; -1 is the last.")] = -1,
    batch_size: Annotated[int, typer.Option(help="Prompts a forward pass.")] = 32,
    max_length: Annotated[int, typer.Option(help="Tokens; longer prompts are an error.")] = 2048,
    device: Annotated[str, typer.Option(help="Torch device.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    attention: Annotated[str, typer.Option(help="Attention backend of transformers.")] = "sdpa",
    stream: Annotated[
        bool, typer.Option(help="Stream layers through the engine: for models above GPU memory.")
    ] = False,
    untrained: Annotated[
        int | None,
        typer.Option(help="Seed: embed an untrained twin of the same architecture instead."),
    ] = None,
    cache: Annotated[
        Path | None, typer.Option(help="Folder that keeps vectors; a killed run goes on.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Embed a panel's prompts.

    The file carries weights hash, template, pooling, layer and stack; headrace audit reads them
    and refuses to compare models of different stacks.
    """
    import sys
    from json import dumps

    from headrace.audit import read_panel
    from headrace.audit.embed import EmbedConfig, embed_panel
    from headrace.audit.recipe import panel_from_recipe
    from headrace.audit.vector_cache import write_vectors
    from headrace.cli._embedders import plain_embedder, streaming_embedder
    from headrace.units import format_count

    config = EmbedConfig(
        pooling=pooling,  # type: ignore[arg-type]  # checked by EmbedConfig
        layer=layer,
        batch_size=batch_size,
        max_length=max_length,
    )
    is_recipe = panel.suffix in {".yaml", ".yml"}
    rows = panel_from_recipe(panel)[0] if is_recipe else read_panel(panel)
    if stream:
        embedder = streaming_embedder(
            model, layer=layer, device=device, dtype=dtype, untrained=untrained
        )
    else:
        embedder = plain_embedder(
            model, layer=layer, device=device, dtype=dtype, attention=attention, untrained=untrained
        )

    def progress(done: int, total: int) -> None:
        if done == total or (done // batch_size) % 20 == 0:
            print(f"embedded {done} of {total} prompts", file=sys.stderr, flush=True)

    with embedder:
        source = embed_panel(
            rows,
            tokenizer=embedder.tokenizer,
            forward=embedder.forward,
            weights=embedder.weights,
            stack=embedder.stack,
            template=template,
            config=config,
            cache_dir=cache,
            source=embedder.source,
            progress=progress,
        )
    vectors = source.values
    key = source.file_key(rows.sha256())
    write_vectors(out, vectors, key)  # type: ignore[arg-type]  # embed_panel returns an array
    if json:
        facts = {"out": str(out), "num_rows": len(vectors), "dimension": vectors.shape[1]}  # type: ignore[arg-type,union-attr]  # as above
        print(dumps(facts | key | {"fingerprint": source.fingerprint}))
    else:
        print(
            f"{format_count(len(rows.embedded_rows))} vectors in {out}, stack {source.fingerprint}"
        )
