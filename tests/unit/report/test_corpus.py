"""What the report says of a corpus: dates, counts, vintages, and checks that failed."""

from __future__ import annotations

import json

import pytest

from headrace.errors import DataError
from headrace.report.render import write_report


def blocks(data, kind):
    return [b for s in data["sections"] if s["name"] == "corpus" for b in s["blocks"] if kind in b]


@pytest.fixture
def report(tmp_path, no_drawing):
    def write(*folders):
        return write_report(out=tmp_path / "r.html", corpora=folders)

    return write


def test_a_corpus_alone_makes_a_page(tmp_path, make_manifest, report):
    data = report(make_manifest(tmp_path / "c"))
    assert data["headline"] == "A corpus, not yet audited"
    (picture,) = blocks(data, "picture")
    assert picture["data"] == {
        "kept": {"news": {"2005-01": 4, "2006-12": 2}}, "cutoffs": {"c": "2006-12-31"}
    }  # fmt: skip
    counts, _, checks, examples = blocks(data, "table")
    rows = {row[0]: row[1:] for row in counts["rows"] + checks["rows"]}
    assert rows["Documents"] == ["6"]
    assert rows["Left out: after the cutoff"] == ["3"]
    assert rows["Last month"] == ["2006-12"]
    assert rows["future mentions"][:3] == ["passed", "0.43%", "2.0%"]
    assert "in 2100 <b>" in examples["rows"][0][1]
    assert "in 2100 &lt;b&gt;" in (tmp_path / "r.html").read_text()


def test_vintages_show_what_each_adds(tmp_path, make_manifest, report):
    folder = tmp_path / "c"
    make_manifest(folder / "early")
    make_manifest(
        folder / "late", cutoff="2010-12-31", months={"2005-01": 4, "2006-12": 2, "2009-05": 7}
    )
    (folder / "manifest.json").write_text(
        json.dumps({"format": "headrace-corpus", "version": 1,
                    "vintages": [{"path": "early"}, {"path": "late"}]})
    )  # fmt: skip
    data = report(folder)
    (picture,) = blocks(data, "picture")
    assert picture["data"]["kept"]["added by late"] == {"2009-05": 7}
    assert picture["data"]["cutoffs"] == {"early": "2006-12-31", "late": "2010-12-31"}
    assert len(data["sources"]) == 3
    checks = next(t for t in blocks(data, "table") if t["columns"][-1] == "Limit")
    assert checks["rows"][0] == ["future mentions", "passed, 0.43%", "passed, 0.43%", "2.0%"]


@pytest.mark.parametrize("status", ["warned", "failed"])
def test_a_check_that_failed_is_on_page_one_and_listed(tmp_path, make_manifest, report, status):
    check = {"name": "concentration", "status": status, "value": 0.9, "limit": 0.5,
             "message": "one month holds 90%", "examples": []}  # fmt: skip
    data = report(make_manifest(tmp_path / "c", checks=[check]))
    assert data["failed"] == ["c, concentration: one month holds 90%."]
    assert data["warnings"][0].startswith("1 check failed")


def test_parts_that_a_manifest_lacks_are_said(tmp_path, make_manifest, report):
    data = report(make_manifest(tmp_path / "c", months={}, checks=[]))
    assert any("no histogram" in text for text in data["missing"])
    assert any("no checks" in text for text in data["missing"])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": 9}, "version 9"),
        ({"format": "zip"}, "'zip'"),
        ({"cutoff_given": "someday"}, "'someday' is not a date"),
        ({"histogram": [{"source": "a", "month": "2005-13", "documents": 1}]}, "not YYYY-MM"),
        ({"counts": None}, "counts: expected an object"),
        ({"checks": [{"name": "x"}]}, "'status' is missing"),
    ],
)
def test_a_bad_manifest_is_an_error_that_names_the_place(
    tmp_path, make_manifest, report, changes, words
):
    with pytest.raises(DataError) as error:
        report(make_manifest(tmp_path / "c", **changes))
    assert words in str(error.value)


@pytest.mark.parametrize(
    "months",
    [
        {"2013-05": 900},  # one month only, whatever the cutoff claims
        {f"{y}-{m:02d}": 1 for y in range(1790, 2027) for m in range(1, 13)},
        {"1790-01": 1, "2026-02": 1},
    ],
)
def test_any_span_of_dates_can_be_drawn(tmp_path, make_manifest, months):
    folder = make_manifest(tmp_path / "c", cutoff="2026-12-31", months=months)
    data = write_report(out=tmp_path / "r.html", corpora=[folder])
    assert sum(blocks(data, "picture")[0]["data"]["kept"]["news"].values()) == sum(months.values())
