"""Putting a corpus folder together and in its place, in one step.

::

    OUTPUT/
      manifest.json       what this is
      documents/*.parquet documents with their instants
      tokens/*.parquet    input_ids, one row a document; only with a tokenizer
      tokenizer/          loads with AutoTokenizer.from_pretrained; only with a tokenizer
      inputs.jsonl        every input file with its hash
      rejected.parquet    every record that is not in the corpus, with reason and position

With several cutoffs each vintage is such a folder below OUTPUT, named by its cutoff, and
OUTPUT's own manifest lists them. Files that vintages share are one file with several names.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace import __version__
from headrace.corpus.config import CorpusConfig, rule_for
from headrace.corpus.files import (
    COMPLETE,
    canonical_json,
    file_sha256,
    hash_of,
    link_or_copy,
    put_in_place,
    write_json,
)
from headrace.corpus.instants import format_instant
from headrace.corpus.manifest import FORMAT, FORMAT_VERSION, MANIFEST_FILE, Manifest
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from headrace.corpus.cutoff import Cutoff
    from headrace.corpus.sources.units import InputFile

_SHARED = ("rejected.parquet", "inputs.jsonl")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFiles:
    """One segment of a shard on disk, and what it is called in the corpus."""

    name: str
    mask: int
    documents: Path
    tokens: Path | None
    num_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Vintage:
    """One vintage: its cutoff, the bit of the masks that means it, its facts and checks."""

    cutoff: Cutoff
    bit: int
    facts: dict[str, Any]
    checks: list[dict[str, Any]]


def check_output(place: Path) -> None:
    """Refuse to replace what is not a corpus.

    Raises:
        ConfigError: the folder exists and is something else.
    """
    if not place.exists():
        return
    if not place.is_dir():
        raise ConfigError(f"output_dir {place} is a file", remedy="name a folder")
    if any(place.iterdir()):
        try:
            Manifest.load(place)
        except Exception as error:
            raise ConfigError(
                f"output_dir {place} exists and is not a corpus",
                remedy="name another folder, or empty this one",
            ) from error


def write_inputs(path: Path, files: Mapping[str, Sequence[InputFile]]) -> None:
    """One line an input file: source, name, bytes, hash."""
    with path.open("w", encoding="utf-8") as out:
        for source, inputs in files.items():
            for file in inputs:
                line = {
                    "source": source,
                    "file": file.name,
                    "bytes": file.num_bytes,
                    "sha256": file.sha256,
                }
                out.write(canonical_json(line) + "\n")


def settings_json(config: CorpusConfig) -> dict[str, Any]:
    """The configuration as resolved, without what does not change the corpus."""
    values = config.model_dump(mode="json")
    for key in ("output_dir", "work_dir", "num_workers", "executor"):
        del values[key]
    return values


class Publisher:
    """Fills a building folder, then puts it in place."""

    def __init__(
        self, config: CorpusConfig, building: Path, rule_versions: Mapping[str, int]
    ) -> None:
        """``building`` must be on the same file system as ``output_dir``."""
        self._config = config
        self._place = Path(config.output_dir)
        self._building = building
        self._rules = dict(rule_versions)
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir(parents=True)
        self._hashes: dict[int, str] = {}
        self._manifests: list[tuple[Cutoff, dict[str, Any]]] = []

    def shared_file(self, name: str) -> Path:
        """Where a file that all vintages have is written, once."""
        assert name in _SHARED
        return self._building / name

    def add_vintage(
        self,
        vintage: Vintage,
        shards: Iterable[ShardFiles],
        tokenizer_folder: Path | None,
        *,
        alone: bool,
    ) -> None:
        """Link a vintage's files into its folder and write its manifest."""
        folder = self._building if alone else self._building / vintage.cutoff.name
        outputs: list[dict[str, Any]] = []
        for shard in shards:
            if not shard.mask >> vintage.bit & 1:
                continue
            for kind, source in (("documents", shard.documents), ("tokens", shard.tokens)):
                if source is not None:
                    target = folder / kind / f"{shard.name}.parquet"
                    link_or_copy(source, target)
                    outputs.append(self._output(folder, target, shard.num_rows))
        if tokenizer_folder is not None:
            for source in sorted(tokenizer_folder.iterdir()):
                if source.name != COMPLETE:
                    target = folder / "tokenizer" / source.name
                    link_or_copy(source, target)
                    outputs.append(self._output(folder, target, None))
        for name in _SHARED:
            if not alone:
                link_or_copy(self._building / name, folder / name)
            outputs.append(self._output(folder, folder / name, None))
        manifest = self._manifest(vintage, outputs)
        write_json(folder / MANIFEST_FILE, manifest)
        self._manifests.append((vintage.cutoff, manifest))

    def _output(self, folder: Path, path: Path, num_rows: int | None) -> dict[str, Any]:
        status = path.stat()
        if status.st_ino not in self._hashes:
            self._hashes[status.st_ino] = file_sha256(path)
        entry = {
            "path": path.relative_to(folder).as_posix(),
            "bytes": status.st_size,
            "sha256": self._hashes[status.st_ino],
        }
        if num_rows is not None:
            entry["rows"] = num_rows
        return entry

    def _manifest(self, vintage: Vintage, outputs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        config, cutoff, facts = self._config, vintage.cutoff, vintage.facts
        sources = []
        for source in config.sources:
            rule = rule_for(config, source)
            sources.append(
                {
                    "name": source.name,
                    "type": source.type,
                    "license": source.license,
                    "available_at": rule.describe(),
                    "upper_bound": rule.fields_are_bounds,
                    **facts["inputs"][source.name],
                    **facts["sources"][source.name],
                }
            )
        return {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "headrace_version": __version__,
            "cutoff": format_instant(cutoff.instant_us),
            "cutoff_given": cutoff.given,
            "cutoff_name": cutoff.name,
            "content_sha256": hash_of([[entry["path"], entry["sha256"]] for entry in outputs]),
            "counts": facts["counts"],
            "sources": sources,
            "histogram": facts["histogram"],
            "checks": list(vintage.checks),
            "languages": facts["languages"],
            "tokenizer": facts["tokenizer"],
            "rule_versions": self._rules,
            "config": settings_json(config),
            "outputs": list(outputs),
        }

    def finish(self) -> Manifest:
        """Write the list of vintages where there are several, and move the corpus in place."""
        manifests = self._manifests
        if len(manifests) > 1:
            latest = manifests[-1][1]
            write_json(
                self._building / MANIFEST_FILE,
                {
                    "format": FORMAT,
                    "version": FORMAT_VERSION,
                    "headrace_version": __version__,
                    "cutoff": latest["cutoff"],
                    "content_sha256": hash_of([m["content_sha256"] for _, m in manifests]),
                    "vintages": [
                        {
                            "path": cutoff.name,
                            "cutoff": manifest["cutoff"],
                            "documents": manifest["counts"]["documents"],
                            "tokens": manifest["counts"]["tokens"],
                            "content_sha256": manifest["content_sha256"],
                        }
                        for cutoff, manifest in manifests
                    ],
                    "counts": latest["counts"],
                    "checks": latest["checks"],
                    "tokenizer": latest["tokenizer"],
                },
            )
        put_in_place(self._building, self._place)
        return Manifest.load(self._place)


def write_failure(folder: Path, name: str, record: Mapping[str, Any]) -> None:
    """Leave what a refused build found beside its work."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / name, record)
