"""``headrace corpus build`` and ``headrace corpus inspect``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from headrace.corpus.progress import Progress

app = typer.Typer(
    help="Build and inspect point-in-time corpora.", no_args_is_help=True, add_completion=False
)


@app.command("build")
def build_command(
    config: Annotated[Path, typer.Argument(help="YAML file; its keys are in docs/corpus.md.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key=value, e.g. cutoff=2017-06-30.")
    ] = None,
    *,
    num_workers: Annotated[
        int | None, typer.Option("--workers", min=1, help="Processes; default: as many as cores.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as one JSON object.")
    ] = False,
) -> None:
    """Build the corpus of a YAML file; run again to resume or to take in what changed."""
    from headrace.corpus.build import build_corpus
    from headrace.corpus.config import load_config

    words = list(overrides or [])
    if num_workers is not None:
        words.append(f"num_workers={num_workers}")
    settings = load_config(config, words)
    show = _ProgressLine()
    try:
        manifest = build_corpus(settings, progress=show)
    finally:
        show.close()
    if as_json:
        print(json.dumps({"path": str(manifest.path), **manifest.data}, ensure_ascii=False))
        return
    from headrace.corpus.inspect import describe

    print(describe(manifest))


@app.command("inspect")
def inspect_command(
    corpus: Annotated[Path, typer.Argument(help="A corpus folder, or one of its vintages.")],
    *,
    by: Annotated[
        str, typer.Option(help="Periods of the histogram: month, year, decade or auto.")
    ] = "auto",
    find: Annotated[str | None, typer.Option(help="List documents that hold this text.")] = None,
    ignore_case: Annotated[
        bool, typer.Option("--ignore-case", help="For --find: letters of either case.")
    ] = False,
    limit: Annotated[int, typer.Option(min=1, help="For --find: at most so many documents.")] = 20,
    diff: Annotated[
        Path | None, typer.Option(help="Compare with another corpus: settings, counts, contents.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write one self-contained HTML page to this file.")
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Hash every file and compare with the manifest.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as one JSON object.")
    ] = False,
) -> None:
    """What a corpus holds, by month and source; its checks; look-ups; differences."""
    from headrace.corpus import inspect as reading
    from headrace.corpus.manifest import Manifest
    from headrace.errors import ConfigError

    if by not in reading.PERIODS:
        raise ConfigError(f"--by {by!r} is no period", remedy=f"use {', '.join(reading.PERIODS)}")
    manifest = Manifest.load(corpus)
    result: dict[str, Any] = {}
    text: list[str] = []
    if verify:
        result["verified_files"] = reading.verify(manifest)
        text.append(f"{result['verified_files']} files are as the manifest says.")
    if find is not None:
        found = list(reading.find_text(manifest, find, ignore_case=ignore_case, limit=limit))
        result["found"] = found
        text.append(reading.describe_found(found, find))
    if diff is not None:
        from headrace.corpus.differences import describe_diff, diff_manifests

        result["diff"] = diff_manifests(manifest, Manifest.load(diff))
        text.append(describe_diff(result["diff"]))
    if html is not None:
        from headrace.corpus.page import write_page

        write_page(manifest, html)
        result["html"] = str(html)
        text.append(f"wrote {html}")
    if not result:
        result = {"path": str(manifest.path), **manifest.data}
        text.append(reading.describe(manifest, by=by))
    print(json.dumps(result, ensure_ascii=False) if as_json else "\n".join(text))


class _ProgressLine:
    """One line that is rewritten on a terminal, one line a stage elsewhere; on stderr."""

    def __init__(self) -> None:
        self._stage = ""
        self._live = sys.stderr.isatty()

    def __call__(self, progress: Progress) -> None:
        share = progress.done / progress.total if progress.total else 1.0
        if self._live:
            print(f"\r\033[K{progress.stage}: {share:4.0%}", end="", file=sys.stderr, flush=True)
        elif progress.stage != self._stage:
            print(f"corpus: {progress.stage}", file=sys.stderr, flush=True)
        self._stage = progress.stage

    def close(self) -> None:
        if self._live and self._stage:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
