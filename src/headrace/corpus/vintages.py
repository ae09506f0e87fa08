"""From findings to vintages: tokens, selection under the budget, shards, checks, the folder.

All vintages come from one pass: a document is tokenised once, written once for each set of
vintages it belongs to, and linked into every vintage's folder.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.corpus.facts import ShardSums, VintageCounts, read_shard_stats, vintage_facts
from headrace.corpus.jobs import TokenJob, run_shard, run_tokens
from headrace.corpus.plan import RULE_VERSIONS, Plan, mask_file
from headrace.corpus.progress import Progress, ProgressCallback
from headrace.corpus.publish import Publisher, ShardFiles, Vintage, write_failure, write_inputs
from headrace.corpus.selection import MOST_BYTES_A_TOKEN, Selector, Stratum, Threshold
from headrace.corpus.shards import ShardJob, read_counts
from headrace.corpus.unit_files import document_bytes
from headrace.corpus.verdicts import judge, refuse_failed
from headrace.corpus.vocabulary import make_tokenizer
from headrace.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np

    from headrace.corpus.config import CorpusConfig
    from headrace.corpus.duplicates import DuplicateSearch, IndexedUnit
    from headrace.corpus.manifest import Manifest
    from headrace.corpus.pool import Pool
    from headrace.corpus.rejections import DocumentNames, Rejections, SourceTally
    from headrace.corpus.tokenizer import TokenizerInfo

_Thresholds = list[dict[Stratum, Threshold]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What all units together have shown."""

    units: list[IndexedUnit]
    rejections: Rejections
    tallies: Mapping[str, SourceTally]
    duplicates: DuplicateSearch
    names: DocumentNames
    counts: list[VintageCounts]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """Finished shards, the tokenizer they were made with, and what the budget came to."""

    files: list[ShardFiles]
    tokenizer: TokenizerInfo | None
    budgets: list[dict[str, Any]]


class ShardMaker:
    """Tokenises, selects, and writes the shards of all vintages."""

    def __init__(
        self,
        config: CorpusConfig,
        plan: Plan,
        findings: Findings,
        pool: Pool,
        progress: ProgressCallback,
    ) -> None:
        """Nothing is done yet."""
        self._config = config
        self._plan = plan
        self._units = findings.units
        self._pool = pool
        self._progress = progress
        self._cutoffs = config.vintages()
        self._masks = config.work_path / "masks"
        self._selector = Selector(
            findings.units, findings.duplicates, self._cutoffs, config.sampling
        )

    def run(self) -> Shards:
        """All shards, each made unless it is there."""
        tokenizer = make_tokenizer(
            self._config, self._plan, self._units, self._selector, self._cutoffs[0]
        )
        budget = self._config.sampling.max_tokens
        thresholds: _Thresholds | None = None
        places: list[Path] | None = None
        if tokenizer is not None:
            if budget is not None:
                # Enough documents for the budget at the least tokens they can have …
                thresholds = self._selector.thresholds(
                    budget * MOST_BYTES_A_TOKEN, self._num_bytes, None
                )
            self._write_masks(thresholds)
            places = self._tokens(tokenizer)
            if budget is not None:
                # … of which the exact counts choose.
                done = places
                thresholds = self._selector.thresholds(
                    budget, lambda number: read_counts(done[number]), thresholds
                )
        self._write_masks(thresholds)
        jobs = self._plan.shard_jobs(self._masks, places, self._cutoffs)
        for done_jobs, _ in enumerate(self._pool.each(run_shard, (job for _, job in jobs)), 1):
            self._progress(Progress(stage="shards", done=done_jobs, total=len(jobs), unit="shards"))
        return Shards(
            files=_shard_files(jobs),
            tokenizer=tokenizer,
            budgets=[_budget_facts(level) for level in thresholds or ()],
        )

    def _num_bytes(self, number: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        return document_bytes(self._units[number].place)

    def _write_masks(self, thresholds: _Thresholds | None) -> None:
        shutil.rmtree(self._masks, ignore_errors=True)
        self._masks.mkdir()
        for number in range(len(self._units)):
            masks = self._selector.sampled_masks(number, thresholds)
            masks.tofile(mask_file(self._masks, number))

    def _tokens(self, tokenizer: TokenizerInfo) -> list[Path]:
        numbers = range(len(self._units))
        places = [self._plan.token_place(n, self._masks, tokenizer.sha256) for n in numbers]
        jobs = (
            TokenJob(
                unit=self._units[number].place,
                masks=mask_file(self._masks, number),
                place=places[number],
                tokenizer_file=tokenizer.folder / "tokenizer.json",
                eos_token_id=tokenizer.eos_token_id,
            )
            for number in numbers
        )
        for done, _ in enumerate(self._pool.each(run_tokens, jobs), start=1):
            self._progress(Progress(stage="tokens", done=done, total=len(numbers), unit="units"))
        return places


def publish_vintages(
    config: CorpusConfig, plan: Plan, findings: Findings, shards: Shards, failed: Path
) -> Manifest:
    """Weigh the checks of every vintage; put the corpus in place, or refuse it.

    Raises:
        DataError: a check that may fail the build did; ``failed/checks.json`` holds them all.
    """
    place = Path(config.output_dir)
    building = place.with_name(f".{place.name}.building")
    cutoffs = config.vintages()
    vintages = []
    for bit, (cutoff, counts) in enumerate(zip(cutoffs, findings.counts, strict=True)):
        sums = ShardSums()
        for source, shard_place in plan.shard_places:
            for mask, segment in read_shard_stats(shard_place).items():
                if mask >> bit & 1:
                    sums.add(source, bit, segment)
        facts = vintage_facts(
            config,
            findings.tallies,
            counts,
            sums,
            findings.names,
            tokenizer=None if shards.tokenizer is None else shards.tokenizer.to_json(),
            budget=shards.budgets[bit] if shards.budgets else {},
        )
        facts["inputs"] = plan.input_facts()
        facts["cutoff_us"] = cutoff.instant_us
        vintages.append(Vintage(cutoff=cutoff, bit=bit, facts=facts, checks=judge(config, facts)))
    try:
        refuse_failed([(v.cutoff.name, v.checks) for v in vintages], str(failed / "checks.json"))
    except DataError:
        write_failure(failed, "checks.json", {v.cutoff.name: v.checks for v in vintages})
        raise
    publisher = Publisher(config, building, RULE_VERSIONS)
    findings.rejections.write(publisher.shared_file("rejected.parquet"), findings.names)
    write_inputs(publisher.shared_file("inputs.jsonl"), plan.files)
    folder = None if shards.tokenizer is None else shards.tokenizer.folder
    for vintage in vintages:
        publisher.add_vintage(vintage, shards.files, folder, alone=len(vintages) == 1)
    return publisher.finish()


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
