"""The two real sources: every text and price checked, levels kept out of the panel."""

from __future__ import annotations

import gzip
import hashlib
import json
import subprocess
import sys
from datetime import date, timedelta

import numpy as np
import pytest

from headrace.errors import ConfigError, DataError
from headrace.quickstart import sources
from headrace.quickstart.panel import FEATURES, PanelConfig, build_panel, prompt
from headrace.quickstart.sources import COMPANY_NAMES, Closes

CUTOFF = "2006-12-31"


def test_documents_are_dated_ordered_and_complete(tmp_path):
    num_documents = sources.write_documents(tmp_path / "d.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "d.jsonl").read_text("utf-8").splitlines()]
    assert len(rows) == num_documents >= 249
    assert sum(row["published_at"] <= CUTOFF for row in rows) == 233
    assert [row["published_at"] for row in rows] == sorted(row["published_at"] for row in rows)
    assert len({row["id"] for row in rows}) == len(rows)
    assert all(len(row["text"]) > 1000 and row["license"] == "MIT" for row in rows)


@pytest.fixture
def addresses(tmp_path, monkeypatch):
    """An installed distribution with one address, to be spoilt."""
    folder = tmp_path / "data"
    (folder / "speeches").mkdir(parents=True)
    text = b"Fellow citizens."
    row = {
        "fileid": "1790-Washington-1", "date": "1790-01-08", "sotu_type": "spoken",
        "president_full": "George Washington", "source_url": "",
        "sha256": hashlib.sha256(text).hexdigest(),
    }  # fmt: skip

    def write():
        (folder / "metadata.csv").write_text(",".join(row) + "\n" + ",".join(row.values()) + "\n")

    (folder / "speeches" / "1790-Washington-1.txt").write_bytes(text)
    write()
    monkeypatch.setattr(sources, "distribution_file", lambda *_: folder / "metadata.csv")
    return folder, row, write


def test_a_changed_text_is_refused_and_nothing_is_left(addresses, tmp_path):
    folder, _, _ = addresses
    assert sources.write_documents(tmp_path / "d.jsonl") == 1
    (tmp_path / "d.jsonl").unlink()
    (folder / "speeches" / "1790-Washington-1.txt").write_bytes(b"Fellow citizens!")
    with pytest.raises(DataError, match="SHA-256"):
        sources.write_documents(tmp_path / "d.jsonl")
    assert not (tmp_path / "d.jsonl").exists()


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [("date", "", "no usable date"), ("fileid", "1791-Nobody-1", "is not there")],
)
def test_an_undated_or_missing_text_is_refused(addresses, tmp_path, field, value, words):
    _, row, write = addresses
    row[field] = value
    write()
    with pytest.raises(DataError, match=words):
        sources.write_documents(tmp_path / "d.jsonl")


def test_closes_are_complete_and_every_company_has_a_name():
    closes = sources.read_closes()
    assert closes.close.shape == (len(closes.dates), 20)
    assert closes.dates[0] == date(1990, 1, 2)
    assert set(closes.entities) == set(COMPANY_NAMES)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["Date,A", "2000-01-03,1.0", "2000-01-03,1.1"], "does not follow"),
        (["Date,A", "2000-01-03,1.0", "2000-01-04,0"], "close of A on 2000-01-04 is 0"),
        (["Date,A", "2000-01-03,1.0", "2000-01-04,"], "could not convert"),
    ],
)
def test_bad_prices_are_refused(lines, words, tmp_path, monkeypatch):
    path = tmp_path / "p.csv.gz"
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    monkeypatch.setattr(sources, "distribution_file", lambda *_: path)
    with pytest.raises(DataError, match=words):
        sources.read_closes()


def test_a_distribution_that_is_not_installed_says_what_to_install():
    with pytest.raises(ConfigError, match=r"headrace\[quickstart\]"):
        sources.distribution_file("headrace-no-such-package", "x")


def test_the_data_packages_are_not_imported():
    code = (
        "import sys; from headrace.quickstart import sources; sources.read_closes();"
        "sys.exit(any(m.split('.')[0] in ('skfolio', 'sotu', 'pandas') for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.fixture
def closes():
    rng = np.random.default_rng(0)
    days = tuple(date(2006, 1, 2) + timedelta(days=i) for i in range(120))
    close = np.exp(np.cumsum(rng.normal(0, 0.02, (120, 3)), axis=0))
    return Closes(dates=days, entities=("A", "B", "C"), close=close, sha256="", version="")


CONFIG = PanelConfig(first=date(2006, 2, 1), last=date(2006, 4, 10), stride=5)


def test_panel_by_hand(closes):
    panel = build_panel(closes, CONFIG).to_dicts()
    row = panel[3 * 7 + 1]  # the eighth date, entity B
    t = closes.dates.index(row["date"])
    c, log = closes.close[:, 1], np.log(closes.close[:, 1])
    assert (row["entity"], t) == ("B", 30 + 7)
    assert row["y"] == pytest.approx(c[t + 2] / c[t + 1] - 1)
    assert (row["label_start"], row["label_end"]) == (closes.dates[t + 1], closes.dates[t + 2])
    assert row["return_5"] == pytest.approx(log[t] - log[t - 5])
    assert row["volatility_20"] == pytest.approx(np.diff(log)[t - 20 : t].std(ddof=1))


def test_no_row_looks_past_its_date_and_levels_do_not_matter(closes):
    before = build_panel(closes, CONFIG)
    t = 60
    changed = closes.close.copy()
    changed[t + 1 :] *= np.random.default_rng(1).uniform(0.5, 2, changed[t + 1 :].shape)
    later = build_panel(
        Closes(dates=closes.dates, entities=closes.entities, close=changed, sha256="", version=""),
        CONFIG,
    )
    rows = before["date"] <= closes.dates[t]
    assert before.filter(rows).select(FEATURES).equals(later.filter(rows).select(FEATURES))
    scaled = Closes(
        dates=closes.dates, entities=closes.entities, close=closes.close * [0.01, 5, 300],
        sha256="", version="",
    )  # fmt: skip
    other = build_panel(scaled, CONFIG)
    for name in ("y", *FEATURES):
        np.testing.assert_allclose(before[name], other[name], atol=1e-12)


def test_one_date_of_each_stride_is_embedded_for_all_entities(closes):
    panel = build_panel(closes, CONFIG)
    by_date = panel.group_by("date", maintain_order=True).agg("embedded")
    flags = [set(row["embedded"]) for row in by_date.to_dicts()]
    assert all(len(flag) == 1 for flag in flags)
    chosen = [flag == {True} for flag in flags]
    assert all(sum(chosen[i : i + 5]) == 1 for i in range(0, len(chosen), 5))


def test_default_panel_meets_the_minimum_of_a_verdict():
    panel = build_panel(sources.read_closes(), PanelConfig())
    days = panel.filter("embedded")["date"].unique().to_list()
    assert (
        min(sum(d <= date(2006, 12, 31) for d in days), sum(d > date(2006, 12, 31) for d in days))
        > 150
    )
    assert len(days) >= 250
    assert panel["entity"].n_unique() == 20


def test_a_panel_without_dates_is_an_error(closes):
    with pytest.raises(ConfigError, match="choose dates between"):
        build_panel(closes, PanelConfig(first=date(1950, 1, 1), last=date(1951, 1, 1)))


def test_prompt_names_day_and_company():
    assert prompt("AAPL", date(2008, 9, 29)) == "September 29, 2008. The shares of Apple will"
