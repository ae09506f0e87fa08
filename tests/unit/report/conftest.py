"""Records as the other parts of headrace write them, small and complete."""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING

import numpy as np
import pytest

from headrace.audit import records as audit_records
from headrace.audit.codec import to_dict
from headrace.report.figures.theme import Canvas

if TYPE_CHECKING:
    from pathlib import Path

STACK = "f00dfeed1234"


def null(values) -> audit_records.Null:
    values = np.asarray(values)
    return audit_records.Null(
        kind="shifted_dates",
        num_draws=len(values),
        median=float(np.median(values)),
        sd=float(values.std()),
        q05=float(np.quantile(values, 0.05)),
        q95=float(np.quantile(values, 0.95)),
        values=tuple(map(float, values)),
    )


class Maker:
    """Figures with distinct values, so that each can be found on the page."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def figure(self, value=None, *, tested=False, width=0.02, n=8000, unit="rows", **more):
        if value is None:
            value = float(self.rng.normal(0, 0.02))
        if tested:
            more["null"] = null(self.rng.normal(0, 0.02, 199))
            more["twins"] = null(self.rng.normal(0, 0.02, 5))
            more.setdefault("p_value", 0.405)
            more["method"] = "shifted_dates"
        else:
            more.update(low=value - width, high=value + width, method="date_block_t", num_blocks=40)
        return audit_records.Figure(
            value=value, n=n, n_unit=unit, protocol="purged_kfold(10)/1", stack=STACK, **more
        )


def model(name: str, verdict: str, make: Maker, *, before: float = 0.001):
    r = audit_records
    return r.ModelRecord(
        name=name,
        cutoff="2006-12-31",
        stack=STACK,
        embedding=r.EmbeddingRecord(
            dimension=256,
            num_rows=8000,
            source="hf",
            weights="abcdef0123456789",
            template="dated/1",
            pooling="last",
            layer=-1,
        ),
        verdict=verdict,
        summary=("The detectable contrast was 0.0123 of the variance.",),
        channels=("common",) if verdict == "knows_the_future" else (),
        share_of_r2=0.0312 if verdict == "knows_the_future" else None,
        cautions=("R² is negative in both arms: less wrong is not right.",),
        evaluation=r.EvaluationRecord(
            r2_on=make.figure(),
            r2_off=make.figure(),
            premium=make.figure(tested=True),
            premium_matched=make.figure(),
            leakage=make.figure(p_value=0.6),
        ),
        skill={
            "common": make.figure(tested=True, n=400, unit="dates"),
            "entity": make.figure(tested=True),
        },
        contamination={
            channel: r.ContaminationRecord(
                channel=channel,
                before=make.figure(before),
                after=make.figure(-0.001),
                contrast=make.figure(
                    before + 0.001, p_value=0.03, p_adjusted=0.06, adjustment="holm"
                ),
                detectable=0.0123,
                reference="mean of 5 twins",
            )
            for channel in ("common", "entity")
        },
        recall=r.RecallRecord(before=make.figure(n=60, unit="dates", p_value=0.3), after=None),
        periods=tuple(
            r.PeriodRecord(
                start=f"{year}-01-01",
                end=f"{year}-12-31",
                side="before" if year < 2007 else "after",
                common=make.figure(),
                entity=make.figure(),
            )
            for year in range(2003, 2011)
        ),
        walk_forward=tuple(
            r.SplitRecord(
                label=str(k + 1),
                train_start="2003-01-02",
                train_end=f"{2004 + k}-12-31",
                test_start=f"{2005 + k}-01-03",
                test_end=f"{2005 + k}-12-30",
                num_train=1000 * k + 1000,
                r2=make.figure(-0.02 * k - 0.01),
            )
            for k in range(5)
        ),
        embargo=(r.EmbargoRecord(embargo_sessions=5, r2_off=make.figure(), premium=make.figure()),),
        perplexity=tuple(
            r.PerplexityRecord(
                month=f"{y}-01", loss=make.figure(5.0 + 0.01 * (y - 2000), n=5000, unit="tokens")
            )
            for y in range(2000, 2012)
        ),
        published=r.PublishedRecord(
            r2_on=make.figure(),
            r2_off=make.figure(),
            premium=make.figure(),
            num_draws=200,
            num_failed_draws=3,
            findings=(
                r.FindingRecord(name="estimate outside interval", present=True, detail="0.219"),
            ),
        ),
    )


def audit_result(verdicts=("no_detectable_skill", "knows_the_future")):
    r, make = audit_records, Maker(3)
    names = ("cutoff-2006", "all-dates", "third", "fourth", "fifth")
    return r.AuditResult(
        panel=r.PanelRecord(
            name="S&P 500, 20 stocks",
            sha256="0" * 64,
            num_rows=8000,
            num_matrix_rows=40300,
            num_entities=20,
            num_dates=403,
            first_date="2003-01-02",
            last_date="2010-12-31",
            coverage=1.0,
            label_sessions=2,
            features=("return_1", "volatility_20"),
            dropped={"no target": 12},
            notes=("Survivors only.",),
        ),
        models=tuple(
            model(name, verdict, make, before=0.03 if verdict == "knows_the_future" else 0.001)
            for name, verdict in zip(names, verdicts, strict=False)
        ),
        settings={"seed": 0, "num_shifts": 199, "protocols": ["chronological", "group_kfold"]},
        stacks={STACK: {"torch": "2.13.0", "device": "cpu", "dtype": "float32"}},
        headrace_version="0.1.0",
        twins=("twin-1", "twin-2"),
        reductions=(
            r.ReductionRecord(
                base="all-dates",
                trained="cutoff-2006",
                skill={"common": make.figure(p_value=0.2), "entity": make.figure(p_value=0.7)},
                premium=make.figure(p_value=0.4),
                published=make.figure(),
            ),
        ),
        slope={"common": make.figure(n=3, unit="models", p_value=0.5)},
        warnings=("The text is small.",),
    )


@pytest.fixture
def no_drawing(monkeypatch):
    """Figures are laid out and not exported, which is nearly all of a report's time."""
    monkeypatch.setattr(Canvas, "svg", lambda self, identity, label: f'<svg id="{identity}"/>')


@pytest.fixture(scope="session")
def complete_audit() -> dict:
    """A complete audit of two models as JSON; not to be changed."""
    return to_dict(audit_result())


@pytest.fixture
def audit(complete_audit) -> dict:
    """A complete audit of two models as JSON, to be spoilt."""
    return copy.deepcopy(complete_audit)


@pytest.fixture
def audit_file(tmp_path: Path, audit: dict) -> Path:
    path = tmp_path / "audit.json"
    path.write_text(json.dumps(audit))
    return path


def write_run(folder: Path, seed: int = 0) -> Path:
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    (folder / "run.json").write_text(
        json.dumps(
            {"num_parameters": 4_200_000, "state_bytes": 50_400_000, "model_hash": "ab" * 32}
        )
    )
    lines = []
    for step in range(5, 151, 5):
        row = {
            "step": step,
            "loss": 8.4 * float(np.exp(-step / 400)) + float(rng.normal(0, 0.03)),
            "learning_rate": 3e-3,
            "grad_norm": 1.0,
            "tokens_per_second": 9000 + float(rng.normal(0, 200)),
            "num_tokens": step * 2048,
            "num_supervised_tokens": step * 2040,
            "exposed_seconds": {"h2d": 0.01, "update": 0.02},
        }
        if step % 50 == 0:
            row["eval_loss"] = row["loss"] + 0.2
        lines.append(json.dumps(row))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="session")
def make_run():
    """Writes a run folder."""
    return write_run


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    return write_run(tmp_path / "runs" / "cutoff-2006")


def write_manifest(folder: Path, *, cutoff="2006-12-31", months=None, **changes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    months = {"2005-01": 4, "2006-12": 2} if months is None else months
    check = {
        "name": "future_mentions", "status": "passed", "value": 0.004292, "limit": 0.02,
        "action": "warn", "message": "1 of 6 documents speak of later years", "counts": {},
        "examples": [{"doc_id": "a", "kind": "year", "snippet": "in 2100 <b>"}],
    }  # fmt: skip
    data = {
        "format": "headrace-corpus", "version": 1, "headrace_version": "0.1.0",
        "cutoff": f"{cutoff}T23:59:59.999999Z", "cutoff_given": cutoff, "content_sha256": "c" * 64,
        "counts": {
            "records": 9, "documents": sum(months.values()), "tokens": 12345, "characters": 67890,
            "after_cutoff": 3, "bad": 0, "exact_duplicates": 1, "near_duplicates": 0,
            "not_sampled": 0, "upper_bound": 0, "filtered": {},
        },
        "sources": [
            {"name": "news", "records": 9, "available_at": "published_at", "license": "MIT"}
        ],
        "histogram": [
            {"source": "news", "month": month, "documents": n} for month, n in months.items()
        ],
        "checks": [check, {**check, "name": "token_budget", "status": "noted", "limit": None,
                           "value": 0.0, "examples": []}],
        "tokenizer": {"origin": "BPE trained on 6 documents", "vocab_size": 4096},
        **changes,
    }  # fmt: skip
    (folder / "manifest.json").write_text(json.dumps(data))
    return folder


@pytest.fixture(scope="session")
def make_manifest():
    """Writes a corpus folder's manifest."""
    return write_manifest
