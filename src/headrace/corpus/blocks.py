"""The corpus's steps as datatrove blocks, for more than one machine.

Two ways, both with datatrove's executors (local, Slurm, Ray):

- :class:`DatatroveWorkers` runs a build's own jobs as tasks over a shared file system: the
  pieces, and so the bytes of the corpus, are those of a build on one machine.
- :class:`AvailabilityFilter` and :class:`FutureMentions` are blocks for pipelines of the user's
  own, beside datatrove's readers, MinHash blocks and writers.

Needs the package datatrove (``pip install 'headrace[scale]'``).
"""

from __future__ import annotations

import subprocess
import time
from collections import Counter
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Protocol

from headrace.corpus.checks.mentions import BODY, CUED_YEAR, MentionFinder, load_entities
from headrace.corpus.cutoff import AvailabilityRule, Dater, parse_cutoff
from headrace.corpus.files import hash_of, is_whole
from headrace.corpus.instants import InstantError, end_of_day, format_instant
from headrace.corpus.jobs import prepare
from headrace.errors import ConfigError, HeadraceError

try:
    from datatrove.pipeline.base import PipelineStep
    from datatrove.pipeline.filters.base_filter import BaseFilter
except ImportError:

    class PipelineStep:  # type: ignore[no-redef]  # stands where datatrove's would
        """Says what is missing when a block is made, not when this module is read."""

        def __init__(self, *_: object) -> None:
            raise ConfigError(
                "corpus blocks need the package datatrove", remedy="pip install 'headrace[scale]'"
            )

    BaseFilter = PipelineStep

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from datetime import date
    from pathlib import Path

    from datatrove.data import Document, DocumentsPipeline

_POLL_SECONDS = 10.0


class Placed(Protocol):
    """A job whose result is a whole folder."""

    @property
    def place(self) -> Path:
        """Where the result is."""
        ...


class RunJobs(PipelineStep):  # type: ignore[misc]  # datatrove is untyped
    """Runs every ``world_size``-th of a list of jobs; finished ones are passed over."""

    name = "corpus jobs"
    type = "headrace"

    def __init__(
        self, values: Mapping[str, Any], function: Callable[[Any], None], jobs: Sequence[Placed]
    ) -> None:
        """Jobs travel with the block; ``values`` is the configuration they are prepared with."""
        super().__init__()
        self.values = dict(values)
        self.function = function
        self.jobs = list(jobs)

    def run(
        self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1
    ) -> Iterator[Document]:
        """Work through this rank's jobs; documents that come in are handed on."""
        prepare(self.values)
        for job in self.jobs[rank::world_size]:
            with self.track_time("job"):
                self.function(job)
            self.stat_update("jobs")
        yield from data or ()


class DatatroveWorkers:
    """Stands in for :class:`headrace.corpus.pool.Workers`, one executor a stage."""

    def __init__(
        self,
        values: Mapping[str, Any],
        *,
        kind: str,
        tasks: int,
        options: Mapping[str, Any],
        logging_dir: Path,
    ) -> None:
        """Choose the executor.

        Args:
            values: the configuration, for the tasks.
            kind: ``local``, ``slurm`` or ``ray``.
            tasks: how many tasks a stage is cut into.
            options: more arguments of the executor (partition, time, mem_per_cpu_gb, …).
            logging_dir: where datatrove keeps logs; on the shared file system.
        """
        self._values = values
        self._kind = kind
        self._tasks = tasks
        self._options = dict(options)
        self._logging_dir = logging_dir

    def each(self, function: Callable[[Any], None], jobs: Iterable[Any]) -> Iterator[Any]:
        """Run all jobs as tasks, wait, and hand them back in order.

        Raises:
            HeadraceError: tasks ended and left pieces undone.
        """
        listed = list(jobs)
        missing = [job for job in listed if not is_whole(job.place)]
        if missing:
            executor = self._executor(RunJobs(self._values, function, missing))
            executor.run()
            self._wait(executor, missing)
        yield from listed

    def _executor(self, block: RunJobs) -> Any:
        from datatrove import executor as executors  # noqa: PLC0415 - Ray's and Slurm's are heavy

        stage = hash_of([str(job.place) for job in block.jobs])[:12]
        arguments: dict[str, Any] = {
            "pipeline": [block],
            "tasks": min(self._tasks, len(block.jobs)),
            "logging_dir": str(self._logging_dir / f"{stage}-{time.time_ns()}"),
            "skip_completed": False,  # a job knows by itself whether it is done
            **self._options,
        }
        if self._kind == "local":
            return executors.LocalPipelineExecutor(**arguments)
        if self._kind == "slurm":
            arguments.setdefault("job_name", "headrace-corpus")
            return executors.SlurmPipelineExecutor(**arguments)
        if self._kind == "ray":
            import ray  # noqa: PLC0415 - optional, and only here

            if not ray.is_initialized():
                ray.init()  # joins the cluster that RAY_ADDRESS names, else starts one here
            return executors.RayPipelineExecutor(**arguments)
        raise ConfigError(f"no executor {self._kind!r}", remedy="use local, slurm or ray")

    @staticmethod
    def _wait(executor: Any, jobs: Sequence[Placed]) -> None:
        job_id = getattr(executor, "job_id", None)
        while job_id is not None and _is_queued(str(job_id)):  # Slurm's run() only submits
            time.sleep(_POLL_SECONDS)
        undone = [job.place for job in jobs if not is_whole(job.place)]
        if undone:
            raise HeadraceError(
                f"{len(undone)} of {len(jobs)} pieces were not made; first {undone[0]}",
                remedy="read the tasks' logs, then run again: what is done is kept",
            )


def _is_queued(job_id: str) -> bool:
    listed = subprocess.run(  # noqa: S603 - a number that Slurm gave
        ["squeue", "--noheader", "--jobs", job_id],  # noqa: S607 - Slurm's own, from the PATH
        capture_output=True,
        text=True,
        check=False,
    )
    return bool(listed.stdout.strip())


class AvailabilityFilter(BaseFilter):  # type: ignore[misc]  # datatrove is untyped
    """Keeps documents available by the cutoff; writes ``available_at`` into the metadata.

    A document that the rule cannot date is dropped with its reason, as everywhere: fail closed.
    The rule's fields are looked up in ``doc.metadata``.
    """

    name = "available by the cutoff"

    def __init__(
        self,
        rule: AvailabilityRule,
        cutoff: str | date,
        *,
        exclusion_writer: Any = None,
        today: date | None = None,
    ) -> None:
        """``today`` is the day after which dates are a wrong clock; default: today, UTC."""
        super().__init__(exclusion_writer)
        self.rule = rule
        self.cutoff = parse_cutoff(cutoff)
        self.latest_us = end_of_day(today or datetime.now(UTC).date(), UTC)
        self._dater: Dater | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Zones and calendars are made again where the block runs."""
        return {**self.__dict__, "_dater": None}

    def filter(self, doc: Document) -> bool | tuple[bool, str]:
        """Whether the document stays, or the reason why not."""
        if self._dater is None:
            self._dater = Dater(self.rule, horizon_us=self.cutoff.instant_us)
        try:
            dated = self._dater.date(doc.metadata)
        except InstantError as error:
            return False, error.reason
        doc.metadata["available_at"] = format_instant(dated.available_at)
        doc.metadata["available_at_rule"] = dated.rule
        doc.metadata["upper_bound"] = dated.upper_bound
        if dated.available_at <= self.cutoff.instant_us:
            return True
        return False, "future_date" if dated.available_at > self.latest_us else "after_cutoff"


class FutureMentions(PipelineStep):  # type: ignore[misc]  # datatrove is untyped
    """Counts sure mentions of what comes after the cutoff; notes them in the metadata."""

    name = "future mentions"
    type = "headrace"

    def __init__(self, cutoff: str | date) -> None:
        """Mentions later than ``cutoff`` are looked for."""
        super().__init__()
        self.cutoff = parse_cutoff(cutoff)

    def run(
        self, data: DocumentsPipeline, rank: int = 0, world_size: int = 1
    ) -> Iterator[Document]:
        """Hand every document on, with ``future_mentions`` where there are any."""
        del rank, world_size
        finder = MentionFinder(self.cutoff.instant_us, load_entities(None))
        for doc in data:
            with self.track_time():
                found = finder.find(doc.text)
            sure = [m for m in found if m.setting == BODY and m.kind >= CUED_YEAR]
            self.stat_update("documents")
            if found:
                self.stat_update("with_mentions")
            if sure:
                self.stat_update("with_sure_mentions")
                kinds = Counter(m.kind for m in sure)
                doc.metadata["future_mentions"] = dict(sorted(kinds.items()))
            yield doc
