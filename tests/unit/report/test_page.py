"""The HTML and the JSON: whole, self-contained, and telling the same."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from itertools import chain

import pytest

from headrace.audit.conclude import choose_reference
from headrace.audit.config import AuditConfig
from headrace.errors import ConfigError, DataError, HeadraceError
from headrace.report.records import read_run
from headrace.report.render import write_report
from headrace.report.sections_training import training
from headrace.report.text import with_interval

PARTS = {
    "evaluation": ("models", "R² and premium"),
    "contamination": ("models", "contrast before and after"),
    "recall": ("models", "recall probe"),
    "periods": ("models", "Skill by period"),
    "walk_forward": ("models", "Walk-forward scores"),
    "embargo": ("models", "embargo"),
    "published": ("models", "vessl-2026"),
    "reductions": ("", "no reduction"),
}


@pytest.fixture(scope="module")
def report(tmp_path_factory, complete_audit, make_run):
    folder = tmp_path_factory.mktemp("report")
    audit = folder / "audit.json"
    audit.write_text(json.dumps(complete_audit))
    run = make_run(folder / "cutoff-2006")
    data = write_report(out=folder / "r.html", json_out=folder / "r.json", runs=[run], audit=audit)
    return (folder / "r.html").read_text(encoding="utf-8"), data, folder


def parse(html: str) -> ET.Element:
    assert html.startswith("<!DOCTYPE html>\n")
    return ET.fromstring(html.split("\n", 1)[1])


def page_text(html: str) -> str:
    class Collector(HTMLParser):
        text = ""

        def handle_data(self, data):
            self.text += data + "\n"

    collector = Collector()
    collector.feed(html)
    return collector.text


def test_html_is_well_formed_and_every_id_is_unique_and_every_link_lands(report):
    root = parse(report[0])
    ids = [node.get("id") for node in root.iter() if node.get("id")]
    assert len(ids) == len(set(ids))
    links = [node.get("href") for node in root.iter() if node.get("href")]
    assert links
    assert {link[1:] for link in links} <= set(ids)
    assert set(re.findall(r"url\(#([^)]+)\)", report[0])) <= set(ids)


def test_html_names_no_address_and_runs_nothing(report):
    html = report[0]
    assert "http" not in html.replace('http-equiv="Content-Security-Policy"', "")
    assert not re.search(r"<script|<link|<img|<iframe|@import|\ssrc=|javascript:|\son\w+=", html)
    assert set(re.findall(r"url\((.)", html)) <= {"#"}


def test_figures_take_every_colour_from_the_page(report):
    for svg in re.findall(r"<svg.*?</svg>", report[0], flags=re.DOTALL):
        assert not re.search(r"#[0-9a-f]{6}", svg)
        assert "var(--" in svg
        assert "font-family" not in svg


def test_every_number_of_the_json_is_on_the_page(report):
    html, data, _ = report
    text = page_text(html)
    rows = [
        [" ".join(cell.itertext()) for cell in row]
        for row in parse(html).iter("tr")
        if row[0].tag == "td" and len(row) == 5
    ]
    assert len(data["figures"]) > 60
    for figure in data["figures"]:
        written = with_interval(figure["value"], figure["low"], figure["high"])
        mine = [row for row in rows if row[0].startswith(figure["label"]) and row[1] == written]
        assert mine, figure["key"]
        assert f"{figure['n']:,} {figure['n_unit']}" in mine[0]
        assert figure["protocol"] in mine[0][-1]
        assert figure["stack"][:12] in text
    for section in data["sections"]:
        assert section["title"] in text
        for block in section["blocks"]:
            cells = [*block.get("facts", {}).values(), *chain.from_iterable(block.get("rows", []))]
            for cell in cells:
                assert cell in text


def test_json_has_no_nan_and_matches_what_was_returned(report):
    text = (report[2] / "r.json").read_text(encoding="utf-8")
    assert json.loads(text, parse_constant=pytest.fail) == report[1]


def test_complete_records_leave_only_what_was_not_given_unexplained(report):
    assert [text[:18] for text in report[1]["missing"]] == ["No corpus manifest"]


@pytest.mark.usefixtures("no_drawing")
@pytest.mark.parametrize("part", PARTS)
def test_a_missing_part_becomes_a_sentence(part, tmp_path, audit):
    place, words = PARTS[part]
    for holder in audit[place] if place else [audit]:
        holder.pop(part)
    path = tmp_path / "audit.json"
    path.write_text(json.dumps(audit))
    data = write_report(out=tmp_path / "r.html", audit=path)
    explained = [text for text in data["missing"] if words in text]
    assert explained
    html = (tmp_path / "r.html").read_text()
    parse(html)
    assert explained[0] in page_text(html)


@pytest.mark.usefixtures("no_drawing")
def test_without_an_audit_the_page_says_that_it_knows_nothing_of_the_future(tmp_path, run_folder):
    data = write_report(out=tmp_path / "r.html", runs=[run_folder])
    assert data["headline"] == "Trained, and not yet audited"
    assert any("says nothing about what the models know" in text for text in data["missing"])


def test_an_audit_whose_models_were_refused_still_makes_a_page(tmp_path, audit):
    for model in audit["models"]:
        kept = ("name", "cutoff", "stack", "embedding", "verdict", "summary")
        for key in [key for key in model if key not in kept]:
            del model[key]
        model["verdict"] = "too_little_data"
    audit["reductions"], audit["slope"] = [], {}
    path = tmp_path / "audit.json"
    path.write_text(json.dumps(audit))
    data = write_report(out=tmp_path / "r.html", audit=path)
    assert data["headline"] == "Both models: too little data to tell"
    assert data["figures"] == []
    assert len(data["missing"]) >= 8


def test_twins_that_are_absent_are_not_explained(tmp_path, audit):
    told = []
    for kept in (True, False):
        for model in audit["models"]:
            figures = [*model["skill"].values(), model["evaluation"]["premium"]]
            for figure in figures:
                figure["twins"] = figure["twins"] if kept else None
            for record in model["contamination"].values():
                record["reference"] = "mean of 4 untrained twins" if kept else "the constant"
        (tmp_path / "audit.json").write_text(json.dumps(audit))
        write_report(out=tmp_path / "r.html", audit=tmp_path / "audit.json")
        html = (tmp_path / "r.html").read_text(encoding="utf-8")
        words = ("Open circles", "untrained twins", "and twins", "reference networks")
        told.append([word in html for word in words])
    assert told == [[True] * 4, [False] * 4]


@pytest.mark.parametrize(
    ("num_twins", "named", "told"),
    [
        (4, None, "over reference networks that cannot know"),
        (2, None, "over the constant"),
        (4, "early", "over model early"),
    ],
)
@pytest.mark.usefixtures("no_drawing")
def test_what_gains_were_measured_over_is_what_the_audit_did(
    tmp_path, audit, num_twins, named, told
):
    _, words = choose_reference([], [None] * num_twins, AuditConfig(), named)
    for model in audit["models"]:
        for record in model["contamination"].values():
            record["reference"] = words
    (tmp_path / "audit.json").write_text(json.dumps(audit))
    write_report(out=tmp_path / "r.html", audit=tmp_path / "audit.json")
    text = page_text((tmp_path / "r.html").read_text(encoding="utf-8"))
    assert re.findall(r"The gain is measured (.*?)[.,:]", text) == [told]


def test_names_are_text_and_never_markup_or_formulas(tmp_path, audit):
    names = ['<b>&"x"', "$a$ and $b$ 模型"]
    for model, name in zip(audit["models"], names, strict=True):
        model["name"] = name
    path = tmp_path / "audit.json"
    path.write_text(json.dumps(audit))
    write_report(out=tmp_path / "r.html", audit=path)
    html = (tmp_path / "r.html").read_text(encoding="utf-8")
    parse(html)
    assert all(name in page_text(html) for name in names)


@pytest.mark.usefixtures("no_drawing")
def test_numbers_that_are_not_finite_or_null_are_a_dash(tmp_path, audit):
    audit["models"][0]["skill"]["common"]["value"] = None
    audit["models"][0]["evaluation"]["r2_on"].update(value=None, low=None, high=None)
    path = tmp_path / "audit.json"
    audit["models"][1]["contamination"]["common"]["detectable"] = float("nan")
    path.write_text(json.dumps(audit))
    write_report(out=tmp_path / "r.html", json_out=tmp_path / "r.json", audit=path)
    text = page_text((tmp_path / "r.html").read_text())
    assert not re.search(r"\bnan\b|None", text)
    assert "NaN" not in (tmp_path / "r.json").read_text()


@pytest.mark.usefixtures("no_drawing")
@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda a: a["models"][1]["skill"]["common"].pop("n"), "models[1].skill.common"),
        (lambda a: a["models"][0].update(verdict="guilty"), "'guilty' is none of"),
        (lambda a: a.update(schema_version=99), "version 99"),
        (lambda a: a.update(schema="headrace.report"), "that headrace audit wrote"),
        (lambda a: a.update(schema="other"), "'other'"),
        (lambda a: a.pop("panel"), "'panel' is missing"),
        (lambda a: a["models"][0]["skill"].update(common=3), "models[0].skill.common"),
        (lambda a: a["models"][0]["periods"][2].update(start="soon"), "'soon' is not a date"),
        (lambda a: a.update(models={}), "models: expected a list"),
        (lambda a: a["models"][0]["skill"]["common"].update(p_value="low"), "expected a number"),
    ],
)
def test_a_bad_record_is_an_error_that_names_the_place(spoil, words, tmp_path, audit):
    spoil(audit)
    path = tmp_path / "audit.json"
    path.write_text(json.dumps(audit))
    with pytest.raises(DataError, match=re.escape(words)):
        write_report(out=tmp_path / "r.html", audit=path)
    assert not (tmp_path / "r.html").exists()


def test_a_file_that_is_not_json_is_an_error(tmp_path):
    (tmp_path / "audit.json").write_text("{")
    with pytest.raises(DataError, match="is not JSON"):
        write_report(out=tmp_path / "r.html", audit=tmp_path / "audit.json")


def test_nothing_given_and_nothing_there_are_errors(tmp_path):
    with pytest.raises(ConfigError, match="at least one record"):
        write_report(out=tmp_path / "r.html")
    with pytest.raises(ConfigError, match="no training run at"):
        write_report(out=tmp_path / "r.html", runs=[tmp_path / "none"])


@pytest.mark.usefixtures("no_drawing")
def test_a_half_written_last_metric_is_left_out_and_a_bad_one_inside_is_an_error(
    tmp_path, run_folder
):
    path = run_folder / "metrics.jsonl"
    whole = path.read_text()
    path.write_text(whole + '{"step": 155, "lo')
    data = write_report(out=tmp_path / "r.html", runs=[run_folder])
    (curve,) = [b for s in data["sections"] for b in s["blocks"] if b.get("picture") == "loss"]
    assert curve["data"]["cutoff-2006"][0][-1] == 150
    path.write_text("{bad\n" + whole)
    with pytest.raises(DataError, match="line 1 is not JSON"):
        write_report(out=tmp_path / "r.html", runs=[run_folder])


@pytest.mark.usefixtures("no_drawing")
def test_a_failed_write_leaves_the_old_report(tmp_path, audit_file, monkeypatch):
    out = tmp_path / "r.html"
    out.write_text("old")

    def broken(_descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", broken)
    with pytest.raises(HeadraceError, match="No space left"):
        write_report(out=out, audit=audit_file)
    assert out.read_text() == "old"
    assert not list(tmp_path.glob(".r.html*"))


@pytest.mark.parametrize(
    ("facts", "cell"),
    [
        ({"num_trained_parameters": 4_200_000}, None),
        ({"num_trained_parameters": 1_000_000}, "1.0M"),
        ({"num_trained_parameters": 31_488, "adapters": {"rank": 8}}, "31.5k, adapters of rank 8"),
    ],
)
def test_what_a_run_trained_is_said_where_it_is_not_all(tmp_path, make_run, facts, cell):
    folder = make_run(tmp_path / "run")
    record = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(record | facts))
    run, _ = read_run(folder)
    table = next(block for block in training([run]).blocks if getattr(block, "name", "") == "runs")
    assert dict(table.rows).get("Trained parameters") == cell
