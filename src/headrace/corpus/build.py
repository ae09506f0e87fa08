"""Building a corpus: units → duplicates → tokenizer → selection → shards → a folder in place.

Every stage leaves pieces named by a hash of all they depend on, so a build resumes after a
kill at any moment, and redoes only what changed when a source is added. The corpus folder
itself changes in one step, at the end.
"""

from __future__ import annotations

import errno
import shutil
from contextlib import contextmanager
from datetime import UTC, date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.corpus.calendars import EDGAR
from headrace.corpus.config import rule_for
from headrace.corpus.duplicates import (
    SAME_ID,
    DuplicateRules,
    DuplicateSearch,
    IndexedUnit,
)
from headrace.corpus.facts import bad_limit, count_vintages
from headrace.corpus.files import remove_temporaries, sole_user
from headrace.corpus.instants import DAY_US, end_of_day, format_instant
from headrace.corpus.jobs import UnitJob, prepare, run_unit
from headrace.corpus.plan import Plan, make_plan
from headrace.corpus.pool import Pool, default_num_workers, warm_up, workers
from headrace.corpus.progress import Progress, ProgressCallback
from headrace.corpus.publish import check_output, write_failure
from headrace.corpus.rejections import (
    DocumentNames,
    Rejections,
    SourceTally,
    read_stats,
    refuse_bad_sources,
)
from headrace.corpus.unit_files import read_index
from headrace.corpus.vintages import Findings, ShardMaker, publish_vintages
from headrace.errors import CapacityError, DataError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from headrace.corpus.config import CorpusConfig, Executor
    from headrace.corpus.manifest import Manifest

_WORKER_BYTES = 8 << 20  # less input than this a process is not worth starting one


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
            planned = make_plan(config, work, lambda size: _start_server(config, size))
            return _Build(config, planned, progress or (lambda _: None), today).run()
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise CapacityError(
                f"the disk is full while writing below {work}: {error}",
                remedy="free space and run again; what is done is kept",
            ) from error
        raise


def _num_workers(config: CorpusConfig, num_bytes: int) -> int:
    most = min(default_num_workers(), max(1, num_bytes // _WORKER_BYTES))
    return config.num_workers or most


def _start_server(config: CorpusConfig, num_bytes: int) -> None:
    """Import what workers need while this process hashes the inputs."""
    if config.executor is None and _num_workers(config, num_bytes) > 1:
        calendars = {rule_for(config, source).calendar for source in config.sources}
        slow = ["exchange_calendars"] if calendars - {None, EDGAR} else []
        # pyarrow imports pandas, where it is installed, when it makes its first array.
        warm_up(run_unit.__module__, "pandas", *slow)


def _cluster(executor: Executor, values: dict[str, Any], work: Path) -> Pool:
    from headrace.corpus.blocks import DatatroveWorkers  # noqa: PLC0415 - optional, slow to import

    return DatatroveWorkers(
        values,
        kind=executor.type,
        tasks=executor.tasks,
        options=executor.options,
        logging_dir=work / "logs",
    )


class _Build:
    """One build; the steps in order."""

    def __init__(
        self,
        config: CorpusConfig,
        planned: Plan,
        progress: ProgressCallback,
        today: date | None,
    ) -> None:
        self._config = config
        self._plan = planned
        self._progress = progress
        self._cutoffs = config.vintages()
        self._failed = config.work_path / "failed"
        shutil.rmtree(self._failed, ignore_errors=True)
        # A day of grace: somewhere it is tomorrow already.
        self._now_us = end_of_day(today or datetime.now(UTC).date(), UTC) + DAY_US

    def run(self) -> Manifest:
        with self._pool() as pool:
            self._pass_units(pool)
            findings = self._find()
            maker = ShardMaker(self._config, self._plan, findings, pool, self._progress)
            shards = maker.run()
        try:
            manifest = publish_vintages(self._config, self._plan, findings, shards, self._failed)
        except DataError as error:
            self._leave_report(findings.tallies, error)
            raise
        findings.duplicates.close()
        self._plan.remove_unused()
        return manifest

    @contextmanager
    def _pool(self) -> Iterator[Pool]:
        values = self._config.model_dump(mode="json")
        executor = self._config.executor
        if executor is not None:
            yield _cluster(executor, values, self._config.work_path)
            return
        num_bytes = sum(unit.num_bytes for unit in self._plan.units)
        with workers(_num_workers(self._config, num_bytes), prepare, values) as pool:
            yield pool

    def _pass_units(self, pool: Pool) -> None:
        total = sum(unit.num_bytes for unit in self._plan.units)
        done = 0
        jobs = (
            UnitJob(unit=unit, place=place)
            for unit, place in zip(self._plan.units, self._plan.places, strict=True)
        )
        for job in pool.each(run_unit, jobs):
            done += job.unit.num_bytes
            self._progress(Progress(stage="documents", done=done, total=total, unit="bytes"))

    def _find(self) -> Findings:
        """What only all units together show: bad sources, duplicates, counts by vintage."""
        units = self._indexed()
        rejections = Rejections(self._plan.units, self._plan.places, self._now_us)
        tallies = rejections.tally()
        self._refuse_bad(tallies)
        self._refuse_empty(tallies, units)
        rules = DuplicateRules(
            near=self._config.checks.near_duplicates,
            keep_ids=frozenset(s.name for s in self._config.sources if s.revisions == "keep"),
        )
        duplicates = DuplicateSearch(units, rules, self._config.work_path / "duplicates")
        duplicates.run()
        names = DocumentNames(units, duplicates, rejections.bases)
        self._count_same_ids(tallies, names)
        self._refuse_bad(tallies)
        self._progress(Progress(stage="duplicates", done=1, total=1, unit="searches"))
        return Findings(
            units=units,
            rejections=rejections,
            tallies=tallies,
            duplicates=duplicates,
            names=names,
            counts=count_vintages(units, duplicates, self._cutoffs),
        )

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
        names: DocumentNames,
    ) -> None:
        for number in range(len(self._plan.units)):
            for row in names.duplicates_in(number, SAME_ID).to_pylist():
                tallies[row["source"]].note(row["reason"], row)

    def _refuse_bad(self, tallies: Mapping[str, SourceTally]) -> None:
        limits = {name: bad_limit(self._config, name) for name in tallies}
        try:
            refuse_bad_sources(tallies, limits, str(self._failed / "report.json"))
        except DataError as error:
            self._leave_report(tallies, error)
            raise

    def _refuse_empty(self, tallies: Mapping[str, SourceTally], units: list[IndexedUnit]) -> None:
        first = self._cutoffs[0]
        earliest = min(
            (
                int(instants.min())
                for unit in units
                if (instants := read_index(unit.place)["available_at"]).size
            ),
            default=None,
        )
        if earliest is not None and earliest <= first.instant_us:
            return
        if earliest is None:
            records = sum(tally.num_records for tally in tallies.values())
            told = [
                f"{count} of {reason} ({tally.examples[reason][0].get('detail', '')})"
                for tally in tallies.values()
                for reason, count in tally.reasons.most_common(4)
            ]
            error = DataError(
                f"the corpus is empty: none of {records} records is a document: {', '.join(told)}",
                remedy="check the sources' fields, filters and rule for available_at",
            )
        else:
            error = DataError(
                f"the corpus is empty: cutoff {first.given} is before every document; the "
                f"earliest is available at {format_instant(earliest)}",
                remedy="choose a later cutoff, or correct the rule for available_at",
            )
        self._leave_report(tallies, error)
        raise error

    def _leave_report(self, tallies: Mapping[str, SourceTally], error: DataError) -> None:
        report: dict[str, Any] = {
            "error": error.message,
            "sources": {
                name: {
                    "records": tally.num_records,
                    "bad_share": tally.bad_share,
                    "reasons": dict(sorted(tally.reasons.items())),
                    "examples": tally.examples,
                }
                for name, tally in tallies.items()
            },
        }
        write_failure(self._failed, "report.json", report)
