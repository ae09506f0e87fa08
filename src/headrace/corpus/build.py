"""Building a corpus: units → duplicates → tokenizer → selection → shards → a folder in place.

Every stage leaves pieces named by a hash of all they depend on, so a build resumes after a
kill at any moment, and redoes only what changed when a source is added. The corpus folder
itself changes in one step, at the end.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime
from os import getpid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.corpus import plan
from headrace.corpus.duplicates import (
    REASON_OF_KIND,
    SAME_ID,
    DuplicateRules,
    DuplicateSearch,
    IndexedUnit,
)
from headrace.corpus.facts import (
    ShardSums,
    VintageCounts,
    bad_limit,
    count_vintages,
    read_shard_stats,
    vintage_facts,
)
from headrace.corpus.files import remove_temporaries, sole_user
from headrace.corpus.instants import DAY_US, end_of_day, format_instant
from headrace.corpus.jobs import TokenJob, UnitJob, prepare, run_shard, run_tokens, run_unit
from headrace.corpus.pool import Workers, default_num_workers, workers
from headrace.corpus.publish import Publisher, ShardFiles, check_output, write_failure, write_inputs
from headrace.corpus.rejections import (
    DocumentNames,
    Rejections,
    SourceTally,
    duplicate_rows,
    read_stats,
    refuse_bad_sources,
)
from headrace.corpus.selection import MOST_BYTES_A_TOKEN, Selector, Stratum, Threshold
from headrace.corpus.shards import ShardJob, read_counts
from headrace.corpus.unit_pass import read_index
from headrace.corpus.verdicts import judge, refuse_failed
from headrace.corpus.vocabulary import make_tokenizer
from headrace.errors import CapacityError, DataError

if TYPE_CHECKING:
    from headrace.corpus.config import CorpusConfig
    from headrace.corpus.manifest import Manifest
    from headrace.corpus.tokenizer import TokenizerInfo

_WORKER_BYTES = 24 << 20  # less input than this a process is not worth starting one


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a build is: ``done`` of ``total`` in ``unit`` of one stage."""

    stage: str
    done: int
    total: int
    unit: str


ProgressCallback = Callable[[Progress], None]


def build_corpus(
    config: CorpusConfig,
    *,
    progress: ProgressCallback | None = None,
    today: date | None = None,
) -> Manifest:
    """Build the corpus that ``config`` describes and put it at ``output_dir``.

    Args:
        config: sources, cutoffs, checks, sampling, tokenizer.
        progress: called after every piece of work.
        today: the day of the build; later dates are a wrong clock. Default: today, UTC.

    Returns:
        The manifest of the finished corpus.

    Raises:
        ConfigError: before any work: a path, tokenizer, calendar or output folder is wrong.
        DataError: nothing is left, a source is too damaged, or a check failed.
        CapacityError: the disk or memory is full; what is done is kept for the next try.
    """
    work = config.work_path
    check_output(Path(config.output_dir))
    try:
        with sole_user(work):
            remove_temporaries(work)
            planned = plan.make_plan(config, work)
            build = _Build(config, planned, progress or (lambda _: None), today)
            return build.run()
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise CapacityError(
                f"the disk is full while writing below {work}: {error}",
                remedy="free space and run again; what is done is kept",
            ) from error
        raise


class _Build:
    """One build; the steps in order."""

    def __init__(
        self,
        config: CorpusConfig,
        planned: plan.Plan,
        progress: ProgressCallback,
        today: date | None,
    ) -> None:
        self._config = config
        self._plan = planned
        self._progress = progress
        self._work = config.work_path
        self._cutoffs = config.vintages()
        self._failed = self._work / "failed"
        shutil.rmtree(self._failed, ignore_errors=True)
        day = today or datetime.now(UTC).date()
        # A day of grace: somewhere it is tomorrow already.
        self._now_us = end_of_day(day, UTC) + DAY_US

    def run(self) -> Manifest:
        num_bytes = sum(unit.num_bytes for unit in self._plan.units)
        wanted = self._config.num_workers or min(
            default_num_workers(), max(1, num_bytes // _WORKER_BYTES)
        )
        values = self._config.model_dump(mode="json")
        with workers(wanted, prepare, values, getpid()) as pool:
            self._pass_units(pool)
            indexed = self._indexed()
            rejections = Rejections(self._plan.units, self._plan.places, self._now_us)
            tallies = rejections.tally()
            self._refuse_bad(tallies)
            self._refuse_empty(tallies, indexed)
            rules = DuplicateRules(
                near=self._config.checks.near_duplicates,
                keep_ids=frozenset(s.name for s in self._config.sources if s.revisions == "keep"),
            )
            duplicates = DuplicateSearch(indexed, rules, self._work / "duplicates")
            self._progress(Progress(stage="duplicates", done=0, total=1, unit="searches"))
            duplicates.run()
            names = DocumentNames(indexed, duplicates)
            self._count_same_ids(tallies, duplicates, names)
            self._refuse_bad(tallies)
            self._progress(Progress(stage="duplicates", done=1, total=1, unit="searches"))
            counts = count_vintages(indexed, duplicates, self._cutoffs)
            shards, tokenizer, budgets = self._shards(pool, indexed, duplicates)
        manifest = self._publish(
            rejections, duplicates, names, tallies, counts, shards, tokenizer, budgets
        )
        duplicates.close()
        self._plan.remove_unused()
        return manifest

    def _pass_units(self, pool: Workers) -> None:
        total = sum(unit.num_bytes for unit in self._plan.units)
        done = 0
        jobs = (
            UnitJob(unit=unit, place=place)
            for unit, place in zip(self._plan.units, self._plan.places, strict=True)
        )
        for job in pool.each(run_unit, jobs):
            done += job.unit.num_bytes
            self._progress(Progress(stage="documents", done=done, total=total, unit="bytes"))

    def _indexed(self) -> list[IndexedUnit]:
        indexed, first = [], 0
        for unit, place in zip(self._plan.units, self._plan.places, strict=True):
            num_rows = read_stats(place)["num_rows"]
            indexed.append(
                IndexedUnit(place=place, source=unit.source, first_ordinal=first, num_rows=num_rows)
            )
            first += num_rows
        return indexed

    def _count_same_ids(
        self,
        tallies: Mapping[str, SourceTally],
        duplicates: DuplicateSearch,
        names: DocumentNames,
    ) -> None:
        for number in range(len(self._plan.units)):
            if not (duplicates.matches_of(number)["kind"] == SAME_ID).any():
                continue
            for row in duplicate_rows(number, duplicates, names):
                if row["reason"] == REASON_OF_KIND[SAME_ID]:
                    tallies[row["source"]].note(row["reason"], row)

    def _refuse_bad(self, tallies: Mapping[str, SourceTally]) -> None:
        limits = {name: bad_limit(self._config, name) for name in tallies}
        try:
            refuse_bad_sources(tallies, limits, str(self._failed / "report.json"))
        except DataError as error:
            self._leave_report(tallies, [], error)
            raise

    def _refuse_empty(self, tallies: Mapping[str, SourceTally], indexed: list[IndexedUnit]) -> None:
        first = self._cutoffs[0]
        earliest: int | None = None
        for unit in indexed:
            instants = read_index(unit.place)["available_at"]
            if instants.size:
                low = int(instants.min())
                earliest = low if earliest is None else min(earliest, low)
        if earliest is not None and earliest <= first.instant_us:
            return
        records = sum(tally.num_records for tally in tallies.values())
        if earliest is None:
            reasons = {r: n for tally in tallies.values() for r, n in tally.reasons.items()}
            error = DataError(
                f"the corpus is empty: none of {records} records is a document ({reasons})",
                remedy="check the sources' fields, filters and rule for available_at",
            )
        else:
            error = DataError(
                f"the corpus is empty: cutoff {first.given} is before every document; the earliest "
                f"is available at {format_instant(earliest)}",
                remedy="choose a later cutoff, or correct the rule for available_at",
            )
        self._leave_report(tallies, [], error)
        raise error

    def _shards(
        self, pool: Workers, indexed: list[IndexedUnit], duplicates: DuplicateSearch
    ) -> tuple[list[ShardFiles], TokenizerInfo | None, list[dict[str, Any]]]:
        """Tokenise, select, and write the shards."""
        selector = Selector(indexed, duplicates, self._cutoffs, self._config.sampling)
        masks = self._work / "masks"
        tokenizer = make_tokenizer(self._config, self._work, indexed, selector, self._cutoffs[0])
        budget = self._config.sampling.max_tokens
        thresholds: list[dict[Stratum, Threshold]] | None = None
        if budget is not None:
            thresholds = selector.thresholds(
                budget * MOST_BYTES_A_TOKEN, self._byte_weights(indexed), None
            )
        token_places: list[Path] | None = None
        if tokenizer is not None:
            self._write_masks(masks, selector, thresholds, len(indexed))
            token_places = self._tokens(pool, indexed, masks, tokenizer)
            if budget is not None:
                places = token_places
                thresholds = selector.thresholds(
                    budget, lambda n: read_counts(places[n]), thresholds
                )
        self._write_masks(masks, selector, thresholds, len(indexed))
        jobs = self._plan.shard_jobs(masks, token_places, self._cutoffs)
        for done, _ in enumerate(pool.each(run_shard, (job for _, job in jobs)), start=1):
            self._progress(Progress(stage="shards", done=done, total=len(jobs), unit="shards"))
        budgets = [_budget_facts(level) for level in thresholds or ()]
        return _shard_files(jobs), tokenizer, budgets

    @staticmethod
    def _byte_weights(
        indexed: list[IndexedUnit],
    ) -> Callable[[int], np.ndarray[Any, np.dtype[np.int64]]]:
        def weigh(number: int) -> np.ndarray[Any, np.dtype[np.int64]]:
            index = read_index(indexed[number].place)
            return index["num_bytes"][index["row"] >= 0].astype(np.int64)

        return weigh

    def _write_masks(
        self,
        folder: Path,
        selector: Selector,
        thresholds: list[dict[Stratum, Threshold]] | None,
        num_units: int,
    ) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for number in range(num_units):
            selector.sampled_masks(number, thresholds).tofile(plan.mask_file(folder, number))

    def _tokens(
        self, pool: Workers, indexed: list[IndexedUnit], masks: Path, tokenizer: TokenizerInfo
    ) -> list[Path]:
        places = [
            self._plan.token_place(number, masks, tokenizer.sha256)
            for number in range(len(indexed))
        ]
        jobs = (
            TokenJob(
                unit=unit.place,
                masks=plan.mask_file(masks, number),
                place=places[number],
                tokenizer_file=tokenizer.folder / "tokenizer.json",
                eos_token_id=tokenizer.eos_token_id,
            )
            for number, unit in enumerate(indexed)
        )
        for done, _ in enumerate(pool.each(run_tokens, jobs), start=1):
            self._progress(Progress(stage="tokens", done=done, total=len(indexed), unit="units"))
        return places

    def _publish(
        self,
        rejections: Rejections,
        duplicates: DuplicateSearch,
        names: DocumentNames,
        tallies: Mapping[str, SourceTally],
        counts: list[VintageCounts],
        shards: list[ShardFiles],
        tokenizer: TokenizerInfo | None,
        budgets: list[dict[str, Any]],
    ) -> Manifest:
        place = Path(self._config.output_dir)
        building = place.with_name(f".{place.name}.building")
        publisher = Publisher(self._config, building, plan.RULE_VERSIONS)
        rejections.write(publisher.shared_file("rejected.parquet"), duplicates, names)
        write_inputs(publisher.shared_file("inputs.jsonl"), self._plan.files)
        judged = []
        for bit, vintage in enumerate(counts):
            sums = ShardSums()
            for source, stats in _segments(self._plan.shard_places):
                for mask, segment in stats.items():
                    if mask >> bit & 1:
                        sums.add(source, bit, segment)
            facts = vintage_facts(
                self._config,
                tallies,
                vintage,
                sums,
                names,
                tokenizer=None if tokenizer is None else tokenizer.to_json(),
                budget=budgets[bit] if budgets else {},
            )
            facts["inputs"] = self._plan.input_facts()
            judged.append((facts, judge(self._config, facts)))
        try:
            refuse_failed(
                [(c.name, checks) for c, (_, checks) in zip(self._cutoffs, judged, strict=True)],
                str(self._failed / "report.json"),
            )
        except DataError as error:
            self._leave_report(tallies, [checks for _, checks in judged], error)
            shutil.rmtree(building, ignore_errors=True)
            raise
        manifests = []
        for bit, (cutoff, (facts, checks)) in enumerate(zip(self._cutoffs, judged, strict=True)):
            manifest = publisher.add_vintage(
                cutoff,
                bit,
                shards,
                facts,
                checks,
                None if tokenizer is None else tokenizer.folder,
                alone=len(counts) == 1,
            )
            manifests.append((cutoff, manifest))
        return publisher.finish(manifests)

    def _leave_report(
        self,
        tallies: Mapping[str, SourceTally],
        checks: list[list[dict[str, Any]]],
        error: DataError,
    ) -> None:
        write_failure(
            self._failed,
            {
                "error": error.message,
                "checks": checks,
                "sources": {
                    name: {
                        "records": tally.num_records,
                        "bad_share": tally.bad_share,
                        "reasons": dict(sorted(tally.reasons.items())),
                        "examples": tally.examples,
                    }
                    for name, tally in tallies.items()
                },
            },
        )


def _segments(places: list[tuple[str, Path]]) -> Iterator[tuple[str, dict[int, dict[str, Any]]]]:
    for source, place in places:
        yield source, read_shard_stats(place)


def _shard_files(jobs: list[tuple[str, ShardJob]]) -> list[ShardFiles]:
    files = []
    for name, job in jobs:
        stats = read_shard_stats(job.place)
        for number, (mask, segment) in enumerate(stats.items()):
            tokens = job.place / f"{mask:x}.tokens.parquet"
            files.append(
                ShardFiles(
                    name=name if len(stats) == 1 else f"{name}-{number}",
                    mask=mask,
                    documents=job.place / f"{mask:x}.documents.parquet",
                    tokens=tokens if tokens.exists() else None,
                    num_rows=sum(month[0] for month in segment["months"].values()),
                )
            )
    return files


def _budget_facts(level: Mapping[Stratum, Threshold]) -> dict[str, Any]:
    used_up = sum(threshold.quota >= threshold.available for threshold in level.values())
    return {
        "strata": len(level),
        "strata_used_up": used_up,
        "largest_quota": max((t.quota for t in level.values()), default=0),
    }
