"""A panel that exists is usable: every defect of the input is an error that names rows."""

from __future__ import annotations

import datetime as dt
import gzip
import re

import numpy as np
import polars as pl
import pytest

from headrace.audit import panel_from_frame, read_panel
from headrace.errors import DataError


def frame(num_days: int = 5) -> pl.DataFrame:
    dates = [dt.date(2020, 1, 1) + dt.timedelta(days=k) for k in range(num_days)]
    return pl.DataFrame(
        {
            "entity": ["a"] * num_days + ["b"] * num_days,
            "date": dates * 2,
            "label_start": dates * 2,
            "label_end": [d + dt.timedelta(days=1) for d in dates] * 2,
            "y": np.linspace(-1, 1, 2 * num_days) ** 3,
            "size": np.arange(2 * num_days),
        }
    )


def test_rows_keep_the_order_of_the_file_because_vectors_match_by_position():
    shuffled = frame().sample(fraction=1.0, shuffle=True, seed=3)
    panel = panel_from_frame(shuffled)
    assert [panel.entities[e] for e in panel.entity] == shuffled["entity"].to_list()
    np.testing.assert_array_equal(panel.y, shuffled["y"].to_numpy())
    assert panel.feature_names == ("size",)


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_files_give_the_panel_of_the_frame(tmp_path, suffix):
    path = tmp_path / f"panel.{suffix}"
    frame().write_csv(path) if suffix == "csv" else frame().write_parquet(path)
    assert read_panel(path).sha256() == panel_from_frame(frame()).sha256()


def bad(**changes) -> pl.DataFrame:
    return frame().with_columns(**changes)


at_3 = pl.int_range(pl.len()) == 3
MISTAKES = {
    "missing target": (bad(y=pl.when(at_3).then(None).otherwise(pl.col("y"))), "row 3"),
    "infinite target": (bad(y=pl.when(at_3).then(np.inf).otherwise(pl.col("y"))), "row 3"),
    "missing feature": (bad(size=pl.when(at_3).then(None).otherwise(pl.col("size"))), "row 3"),
    "constant target": (bad(y=pl.lit(1.0)), "rows 0 to 9"),
    "one entity": (frame()[:5], "rows 0 to 4"),
    "duplicate keys": (pl.concat([frame(), frame()[2:4]]), "2 (a, 2020-01-03), 3"),
    "label ends before it starts": (
        bad(label_end=pl.when(at_3).then(pl.lit(dt.date(2019, 1, 1))).otherwise("label_end")),
        "row 3",
    ),
    "missing date": (bad(date=pl.when(at_3).then(None).otherwise(pl.col("date"))), "row 3"),
    "missing entity": (bad(entity=pl.when(at_3).then(None).otherwise("entity")), "row 3"),
    "zones differ between columns": (
        bad(date=pl.col("date").cast(pl.Datetime("us")).dt.replace_time_zone("UTC")),
        "rows 0 to 9",
    ),
    "zones differ within a column": (
        bad(date=pl.col("date").cast(pl.String) + pl.Series(["T00:00+09:00"] * 9 + ["T00:00Z"])),
        "row 9",
    ),
    "text that is no date": (
        bad(date=pl.when(at_3).then(pl.lit("soon")).otherwise(pl.col("date").cast(pl.String))),
        "row 3",
    ),
    "text among the features": (bad(sector=pl.lit("x")), "'sector'"),
    "missing column": (frame().drop("label_end"), "'label_end'"),
    "no rows": (frame()[:0], "no rows"),
    "nothing embedded": (bad(embedded=pl.lit(value=False)), "'embedded'"),
    "text in the target": (
        bad(y=pl.when(at_3).then(pl.lit("up")).otherwise(pl.col("y").cast(pl.String))),
        "'up') in row 3",
    ),
    "text for a missing target": (
        bad(y=pl.when(at_3).then(pl.lit("NA")).otherwise(pl.col("y").cast(pl.String))),
        "missing or infinite in row 3",
    ),
    "blank entity": (bad(entity=pl.when(at_3).then(pl.lit(" ")).otherwise("entity")), "row 3"),
    "flags that are none": (bad(embedded=pl.when(at_3).then(2).otherwise(1)), "(2) in row 3"),
    "words that are no flags": (
        bad(embedded=pl.when(at_3).then(pl.lit("maybe")).otherwise(pl.lit("yes"))),
        "row 3",
    ),
    "numbers that are no dates": (
        bad(date=pl.when(at_3).then(20201340).otherwise(20200101 + pl.int_range(pl.len()))),
        "20201340) in row 3",
    ),
    "dates beyond any calendar": (
        bad(date=pl.when(at_3).then(2**31 - 1).otherwise(18262).cast(pl.Int32).cast(pl.Date)),
        "(2147483647) in row 3",
    ),
    "constant target where embedded": (
        bad(
            y=pl.when(pl.col("entity") == "a").then(1.0).otherwise("y"),
            embedded=pl.col("entity") == "a",
        ),
        "rows 0, 1, 2, 3, 4",
    ),
    "lists among the features": (bad(sector=pl.lit([1.0, 2.0])), "'sector'"),
    "other case": (frame().rename({"entity": "Entity"}), "lacks 'entity'"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_bad_input_is_refused_by_row(mistake):
    rows, words = MISTAKES[mistake]
    with pytest.raises(DataError, match=re.escape(words)) as caught:
        panel_from_frame(rows)
    assert caught.value.remedy


def test_labels_that_end_before_their_forecast_are_said():
    past = pl.when(at_3).then(pl.lit(dt.date(2019, 1, 1)))
    rows = bad(label_start=past.otherwise("label_start"), label_end=past.otherwise("label_end"))
    (note,) = panel_from_frame(rows).notes
    assert "In 1 of 10 rows" in note
    assert "row 3" in note
    assert not panel_from_frame(frame()).notes


def test_files_that_are_no_panels_are_refused(tmp_path):
    with pytest.raises(DataError, match="no panel file"):
        read_panel(tmp_path / "missing.parquet")
    (tmp_path / "panel.xlsx").write_text("x")
    with pytest.raises(DataError, match=r"\.xlsx"):
        read_panel(tmp_path / "panel.xlsx")
    (tmp_path / "panel.parquet").write_text("x")
    with pytest.raises(DataError, match="cannot be read"):
        read_panel(tmp_path / "panel.parquet")


def plain_csv(separator: str = ",", **changes) -> str:
    return frame().with_columns(**changes).write_csv(separator=separator)


NUMBERED = frame().with_columns(
    pl.col("date", "label_start", "label_end").dt.strftime("%Y%m%d").cast(pl.Int64)
)
SPELLINGS = {
    "byte order mark": b"\xef\xbb\xbf" + plain_csv().encode(),
    "semicolons": plain_csv(";").encode(),
    "semicolons and decimal commas": plain_csv(";").replace(".", ",").encode(),
    "tabs": plain_csv("\t").encode(),
    "carriage returns": plain_csv().replace("\n", "\r\n").encode(),
    "spaces after commas": plain_csv().replace(",", ", ").encode(),
    "dates as numbers": NUMBERED.write_csv().encode(),
    "gzip": gzip.compress(plain_csv().encode()),
    "slashes, the year first": re.sub(r"2020-01-0(\d)", r"2020/1/\1", plain_csv()).encode(),
    "empty lines at the end": (plain_csv() + "\n,,,,,\n\n").encode(),
    "spaces after names": re.sub("^a,", "a ,", plain_csv(), flags=re.MULTILINE).encode(),
    "index column": "\n".join(
        f"{k - 1 if k else ''},{line}" for k, line in enumerate(plain_csv().strip().split("\n"))
    ).encode(),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_the_same_panel_is_read_however_the_file_spells_it(tmp_path, spelling):
    path = tmp_path / ("panel.csv.gz" if spelling == "gzip" else "panel.csv")
    path.write_bytes(SPELLINGS[spelling])
    panel = read_panel(path)
    assert panel.sha256() == panel_from_frame(frame()).sha256()
    assert any("row index" in note for note in panel.notes) == (spelling == "index column")


@pytest.mark.parametrize(
    "column",
    [
        pl.col("entity").cast(pl.Categorical),
        pl.col("entity").replace_strict({"a": 7, "b": 8}),
        pl.col("entity") + "株式🎉é",
        pl.col("date").cast(pl.Datetime("ns")),
        pl.col("date").cast(pl.String).cast(pl.Categorical),
        pl.col("size").cast(pl.String).cast(pl.Categorical),
        pl.col("size").cast(pl.Decimal(20, 4)),
        (pl.col("size") > 3).alias("class"),
    ],
)
def test_column_types_that_mean_the_same_are_taken(column):
    panel = panel_from_frame(frame().with_columns(column))
    np.testing.assert_array_equal(panel.session, panel_from_frame(frame()).session)
    np.testing.assert_array_equal(panel.entity, panel_from_frame(frame()).entity)


@pytest.mark.parametrize("yes", ["true", "TRUE", "1", "yes"])
def test_embedded_is_read_from_text_as_from_flags(yes):
    marked = pl.when(at_3).then(pl.lit("0")).otherwise(pl.lit(yes))
    panel = panel_from_frame(frame().with_columns(embedded=marked))
    assert panel.embedded.sum() == 9
    assert not panel.embedded[3]


def test_codes_of_entities_are_text_whatever_they_look_like(tmp_path):
    codes = frame().with_columns(entity=pl.col("entity").replace({"a": "007", "b": "1E5"}))
    codes.write_csv(tmp_path / "panel.csv")
    assert read_panel(tmp_path / "panel.csv").entities.tolist() == ["007", "1E5"]


def test_a_column_named_twice_is_no_feature(tmp_path):
    text = plain_csv().replace("y,size", "y,y", 1)
    (tmp_path / "panel.csv").write_text(text)
    with pytest.raises(DataError, match="more than one column 'y'"):
        read_panel(tmp_path / "panel.csv")


@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfeentity", plain_csv().encode() + b"a,b,c,d,e,f,g\n"]
)
def test_files_that_are_no_csv_are_refused_with_a_remedy(tmp_path, content):
    (tmp_path / "panel.csv").write_bytes(content)
    with pytest.raises(DataError, match=r"panel\.csv") as caught:
        read_panel(tmp_path / "panel.csv")
    assert caught.value.remedy


@pytest.mark.parametrize("text", ["03/04/2020", "3.4.2020", "2020-W14", "2020-04", "now", "2020"])
def test_text_that_could_be_two_dates_is_refused_by_row(text):
    dates = pl.when(at_3).then(pl.lit(text)).otherwise(pl.col("date").cast(pl.String))
    with pytest.raises(DataError, match=f"'{text}'\\) in row 3"):
        panel_from_frame(bad(date=dates))


def test_a_label_that_ends_on_a_plain_date_lasts_to_its_end():
    afternoon = pl.col("date").cast(pl.Datetime("us")) + pl.duration(hours=15)
    panel = panel_from_frame(bad(date=afternoon))
    assert panel.label_end[0] == np.datetime64("2020-01-02T23:59:59.999999")
    assert "labels last to the end of their day" in panel.notes[0]
    exact = afternoon + pl.duration(days=1)
    assert panel_from_frame(bad(date=afternoon, label_end=exact)).notes == ()


@pytest.mark.parametrize("horizon", [1, 3])
def test_label_sessions_are_counted_in_sessions_not_days(horizon, days, small_panel):
    panel = small_panel(num_sessions=12, horizon=horizon)
    assert panel.label_sessions == horizon
    gap = np.concatenate([days(6), days(6, "2021-01-01")])
    session = np.tile(np.arange(12), 4)
    later = gap[np.minimum(session + horizon, 11)]
    spread = small_panel(
        num_sessions=12, date=gap[session], label_start=gap[session], label_end=later
    )
    assert spread.label_sessions == horizon


def test_matrix_leaves_gaps_missing_and_coverage_counts_them(small_panel):
    full = small_panel()
    keep = np.ones(full.num_rows, dtype=bool)
    keep[[0, 7]] = False
    columns = {
        "entity": full.entities[full.entity][keep],
        "date": full.sessions[full.session][keep],
        "label_start": full.label_start[keep],
        "label_end": full.label_end[keep],
        "y": full.y[keep],
    }
    panel = small_panel(**columns)
    assert np.isnan(panel.matrix(panel.y)).sum() == 2
    assert panel.coverage == pytest.approx(22 / 24)


def test_hash_sees_every_column(small_panel):
    base = small_panel()
    assert base.sha256() == small_panel().sha256()
    assert base.sha256() != small_panel(label_end=base.label_end + np.timedelta64(1, "D")).sha256()
    moved = base.y.copy()
    moved[3] += 1e-9
    assert base.sha256() != small_panel(y=moved).sha256()
