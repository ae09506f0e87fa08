"""What a build will do: input files, units, and the names of all pieces of work.

A piece's name is a hash of everything that it depends on: contents, settings that matter to
it, and the versions of the rules. Planning reads and hashes inputs and checks settings; it
starts no work.
"""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.corpus.checks.furniture import FURNITURE_VERSION
from headrace.corpus.checks.languages import LANGUAGE_VERSION
from headrace.corpus.checks.mentions import MENTION_VERSION, load_entities
from headrace.corpus.config import CorpusConfig, rule_for
from headrace.corpus.cutoff import RULE_VERSION, Cutoff, Dater
from headrace.corpus.duplicates import DUPLICATE_VERSION
from headrace.corpus.encode import ENCODER_VERSION
from headrace.corpus.files import file_sha256, hash_of
from headrace.corpus.fingerprints import FINGERPRINT_VERSION
from headrace.corpus.rejections import position_bases, read_stats
from headrace.corpus.selection import SELECTION_VERSION
from headrace.corpus.shards import SHARD_VERSION, ShardJob, ShardPart
from headrace.corpus.source_config import FolderSource, HfDatasetSource, SourceSettings
from headrace.corpus.sources import READER_VERSION, split_file
from headrace.corpus.sources.context import ReadContext
from headrace.corpus.sources.rows import wanted_fields
from headrace.corpus.sources.spool import spool
from headrace.corpus.sources.units import (
    FileHashes,
    InputFile,
    Unit,
    files_not_matched,
    list_files,
    plan_units,
    resolve_path,
)
from headrace.corpus.tokenizer import (
    TRAINING_VERSION,
    end_of_sequence,
    find_tokenizer_file,
    load_tokenizer,
)
from headrace.corpus.unit_files import UNIT_VERSION
from headrace.corpus.unit_pass import unit_key
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

RULE_VERSIONS: Mapping[str, int] = {
    "units": UNIT_VERSION,
    "readers": READER_VERSION,
    "dating": RULE_VERSION,
    "fingerprints": FINGERPRINT_VERSION,
    "mentions": MENTION_VERSION,
    "languages": LANGUAGE_VERSION,
    "furniture": FURNITURE_VERSION,
    "duplicates": DUPLICATE_VERSION,
    "selection": SELECTION_VERSION,
    "tokens": ENCODER_VERSION,
    "tokenizer_training": TRAINING_VERSION,
    "shards": SHARD_VERSION,
}
_EXAMPLES = 5
_UNIT_RULES = ("units", "readers", "dating", "fingerprints", "mentions", "languages", "furniture")


def mask_file(folder: Path, number: int) -> Path:
    """The masks of a unit's documents."""
    return folder / f"{number}.bin"


@dataclass(slots=True, kw_only=True)
class Plan:
    """Inputs, units and places of one build."""

    config: CorpusConfig
    work: Path
    files: dict[str, list[InputFile]]
    units: list[Unit]
    places: list[Path]
    not_matched: dict[str, list[str]]
    used: set[Path] = field(default_factory=set)
    shard_places: list[tuple[str, Path]] = field(default_factory=list)

    def input_facts(self) -> dict[str, dict[str, Any]]:
        """Files, bytes and one hash over the inputs, by source."""
        return {
            name: {
                "files": len(files),
                "bytes": sum(file.num_bytes for file in files),
                "files_not_matched": len(self.not_matched[name]),
                "first_not_matched": self.not_matched[name][:_EXAMPLES],
                "sha256": hash_of([[file.name, file.sha256] for file in files]),
            }
            for name, files in self.files.items()
        }

    def tokenizer_place(self, key: str) -> Path:
        """Where the tokenizer with this key is."""
        place = self.work / "tokenizers" / key[:32]
        self.used.add(place)
        return place

    def token_place(self, number: int, masks: Path, tokenizer_sha256: str) -> Path:
        """Where a unit's tokens are: they depend on unit, tokenizer and which rows are wanted."""
        wanted = np.fromfile(mask_file(masks, number), dtype=np.uint64) != 0
        key = hash_of(
            [
                self.places[number].name,
                tokenizer_sha256,
                ENCODER_VERSION,
                hashlib.sha256(np.packbits(wanted).tobytes()).hexdigest(),
            ]
        )
        place = self.work / "tokens" / key[:32]
        self.used.add(place)
        return place

    def shard_jobs(
        self, masks: Path, token_places: Sequence[Path] | None, cutoffs: Sequence[Cutoff]
    ) -> list[tuple[str, ShardJob]]:
        """Shards with their names: neighbouring units of one source up to ``shard_bytes``."""
        jobs: list[tuple[str, ShardJob]] = []
        cutoffs_us = tuple(cutoff.instant_us for cutoff in cutoffs)
        num_examples = self.config.checks.future_mentions.num_examples
        bases = position_bases(self.units, self.places)
        self.shard_places.clear()
        for source, groups in self._groups():
            for serial, numbers in enumerate(groups):
                parts = tuple(
                    ShardPart(
                        unit=self.places[number],
                        tokens=None if token_places is None else token_places[number],
                        masks=mask_file(masks, number),
                        first_position=bases[number][0],
                    )
                    for number in numbers
                )
                key = hash_of(
                    [
                        SHARD_VERSION,
                        cutoffs_us,
                        num_examples,
                        [
                            [
                                part.unit.name,
                                None if part.tokens is None else part.tokens.name,
                                file_sha256(part.masks),
                                part.first_position,
                            ]
                            for part in parts
                        ],
                    ]
                )
                place = self.work / "shards" / key[:32]
                self.used.add(place)
                self.shard_places.append((source, place))
                job = ShardJob(
                    place=place, parts=parts, cutoffs_us=cutoffs_us, num_examples=num_examples
                )
                jobs.append((f"{source}-{serial:05d}", job))
        return jobs

    def _groups(self) -> list[tuple[str, list[list[int]]]]:
        """Unit numbers grouped for shards, by source."""
        limit = self.config.shard_bytes
        result: list[tuple[str, list[list[int]]]] = []
        held: list[int] = []
        held_bytes = 0
        for number, unit in enumerate(self.units):
            if not result or result[-1][0] != unit.source:
                result.append((unit.source, []))
                held, held_bytes = [], 0
            if not held:
                held = []
                result[-1][1].append(held)
            held.append(number)
            held_bytes += read_stats(self.places[number])["num_text_bytes"]
            # As with units: a cut that a unit's own key decides survives insertions elsewhere.
            own_cut = int(self.places[number].name[:2], 16) % 4 == 0
            if held_bytes >= limit or (held_bytes >= limit // 4 and own_cut):
                held, held_bytes = [], 0
        return result

    def remove_unused(self) -> None:
        """Remove pieces that this build did not use: what earlier inputs or settings left."""
        for kind in ("units", "tokens", "shards", "tokenizers"):
            folder = self.work / kind
            if not folder.is_dir():
                continue
            for place in folder.iterdir():
                if place not in self.used:
                    shutil.rmtree(place, ignore_errors=True)


def make_plan(
    config: CorpusConfig, work: Path, on_listed: Callable[[int], None] | None = None
) -> Plan:
    """List and hash the inputs, cut them into units, and refuse wrong settings early.

    Args:
        config: the corpus.
        work: where pieces are.
        on_listed: called with the bytes of all inputs before they are hashed.

    Raises:
        ConfigError: a path, index, calendar, entities file or tokenizer is wrong.
        DataError: a source has no files.
    """
    cutoffs = config.vintages()
    _check_tokenizer(config)
    entities_file = config.checks.future_mentions.entities_file
    entities = load_entities(Path(entities_file) if entities_file else None)
    listed = {source.name: _list_inputs(config, source, work) for source in config.sources}
    if on_listed is not None:
        on_listed(sum(path.stat().st_size for files in listed.values() for _, path in files))
    hashes = FileHashes(work / "files.json")
    files: dict[str, list[InputFile]] = {}
    units: list[Unit] = []
    places: list[Path] = []
    for source in config.sources:
        rule = rule_for(config, source)
        Dater(rule, horizon_us=cutoffs[-1].instant_us)  # refuses unknown calendars
        inputs = hashes.describe_all(listed[source.name])
        files[source.name] = inputs
        settings_key = hash_of(
            [
                {name: RULE_VERSIONS[name] for name in _UNIT_RULES},
                _source_settings(source),
                {
                    **asdict(rule),
                    "not_before": str(rule.not_before),
                    "not_after": str(rule.not_after),
                    "after": str(rule.after),
                },
                [cutoffs[0].instant_us, cutoffs[-1].instant_us],
                _unit_checks(config),
                {name: str(day) for name, day in entities.items()},
                config.max_document_bytes,
                _index_hash(source),
            ]
        )
        split = source_splitter(source)
        for unit in plan_units(source, inputs, split):
            units.append(unit)
            places.append(work / "units" / unit_key(settings_key, unit))
    hashes.save()
    return Plan(
        config=config,
        work=work,
        files=files,
        units=units,
        places=places,
        not_matched={source.name: _not_matched(config, source, work) for source in config.sources},
        used=set(places),
    )


def _list_inputs(
    config: CorpusConfig, source: SourceSettings, work: Path
) -> list[tuple[str, Path]]:
    if not isinstance(source, HfDatasetSource) or source.dataset is None:
        return list_files(source, excluded=(Path(config.output_dir), work))
    context = ReadContext.for_rule(rule_for(config, source), config.max_document_bytes)
    folder = spool(source, wanted_fields(source, context), work / "spool")
    return [(path.name, path) for path in sorted(folder.glob("part-*.parquet"))]


def _not_matched(config: CorpusConfig, source: SourceSettings, work: Path) -> list[str]:
    return files_not_matched(source, excluded=(Path(config.output_dir), work))


def source_splitter(source: SourceSettings) -> Any:
    """How this source's files are cut."""
    return lambda file: split_file(source, file)


def _source_settings(source: SourceSettings) -> dict[str, Any]:
    values = source.model_dump(mode="json")
    for key in ("path", "pattern", "license", "max_bad_share", "available_at"):
        del values[key]  # the rule is hashed as resolved; the others change no document
    return values


def _unit_checks(config: CorpusConfig) -> dict[str, Any]:
    checks = config.checks
    near = checks.near_duplicates
    return {
        "length": [checks.length.min_chars, checks.length.max_chars],
        "languages": list(checks.languages.keep),
        "boilerplate": checks.boilerplate.max_document_share,
        "near": [near.enabled, near.num_perm, near.shingle_words, near.seed],
    }


def _index_hash(source: SourceSettings) -> str | None:
    if not isinstance(source, FolderSource) or source.index is None:
        return None
    path = resolve_path(source.index)
    if not path.is_file():
        raise ConfigError(
            f"source {source.name!r}: index {source.index} is not a file",
            remedy="correct its path, or leave it out",
        )
    return file_sha256(path)


def _check_tokenizer(config: CorpusConfig) -> None:
    settings = config.tokenizer
    if settings is not None and settings.path is not None:
        file = find_tokenizer_file(settings.path)
        end_of_sequence(load_tokenizer(file), file, settings.eos_token)
