"""What a text says: years after the cutoff, furniture set apart, languages, hidden HTML."""

from __future__ import annotations

import re
import time
from datetime import UTC, date, datetime
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.corpus.checks import survey as survey_module
from headrace.corpus.checks.furniture import PREFILTER, furniture_share, is_furniture
from headrace.corpus.checks.languages import LanguageGuesser
from headrace.corpus.checks.mentions import (
    BARE_YEAR,
    BODY,
    CUED_YEAR,
    ENTITY,
    FULL_DATE,
    FURNITURE,
    MAX_PER_DOCUMENT,
    OUTLOOK,
    MentionFinder,
    load_entities,
    year_expression,
)
from headrace.corpus.checks.survey import CompiledSurveyor, PlainSurveyor
from headrace.corpus.instants import to_microseconds
from headrace.corpus.sources.html_text import html_text
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

CUTOFF = to_microseconds(datetime(2017, 6, 30, 23, 59, 59, 999999, tzinfo=UTC))
FINDER = MentionFinder(CUTOFF, load_entities(None))
PLAIN = PlainSurveyor(FINDER)
COMPILED = PLAIN if survey_module._text is None else CompiledSurveyor(FINDER)
LEAD = "The board of the mill met again and kept long minutes of all that it had heard. "


def found(sentence: str) -> list[tuple[int, int, str]]:
    """Kind, setting and first day of the mentions in a sentence of ordinary prose."""
    return [
        (m.kind, m.setting, str(date.fromordinal(m.day + date(1970, 1, 1).toordinal())))
        for m in FINDER.find(LEAD + sentence)
    ]


@pytest.mark.parametrize(
    ("sentence", "expected"),
    [
        ("Prices fell in 2019, and the pond froze.", (CUED_YEAR, BODY, "2019-01-01")),
        ("The 2019 harvest was poor.", (BARE_YEAR, BODY, "2019-01-01")),
        ("On 3 March 2018 the wheel broke.", (FULL_DATE, BODY, "2018-03-03")),
        ("On March 3rd, 2018 the wheel broke.", (FULL_DATE, BODY, "2018-03-03")),
        ("In July 2017 the wheel broke.", (FULL_DATE, BODY, "2017-07-01")),
        ("The log of 2017-07-01 says so.", (FULL_DATE, BODY, "2017-07-01")),
        ("It broke on 12/05/2018 again.", (FULL_DATE, BODY, "2018-05-01")),
        ("A fault, CVE-2018-1234, was mended.", (ENTITY, BODY, "2018-01-01")),
        ("Lockdowns under COVID-19 closed it.", (ENTITY, BODY, "2020-02-11")),
        ("The miller asked ChatGPT about it.", (ENTITY, BODY, "2022-11-30")),
        ("Between 2015-2019 the mill stood still.", (CUED_YEAR, BODY, "2019-01-01")),
        ("Profits of FY2019 were low.", (CUED_YEAR, BODY, "2019-01-01")),
        ("In 2019 people left.", (CUED_YEAR, BODY, "2019-01-01")),
        ("It will rise. In 2019 it rose, written down by hand.", (CUED_YEAR, BODY, "2019-01-01")),
        ("The notes mature in 2030.", (CUED_YEAR, OUTLOOK, "2030-01-01")),
        ("By 2040, the pond will be dry.", (CUED_YEAR, OUTLOOK, "2040-01-01")),
    ],
)
def test_mentions(sentence: str, expected: tuple[int, int, str]) -> None:
    assert found(sentence) == [expected]


@pytest.mark.parametrize(
    "sentence",
    [
        "Prices fell in 2016 and in 2017.",
        "On 30 June 2017 the wheel broke.",
        "The key has 2048 bits.",
        "It cost $2019 then.",
        "See RFC 2046 and port 2049 for it.",
        "See RFC-2046 for it.",
        "Version 2019.1 of the text.",
        "A weight of 2,019 stones and 12019 more, or 20190.",
        "Page 2025 of the ledger.",
        "Part number AB2019 and x2020y.",
        "A fault, CVE-2013-2063, was mended.",
        "Of 2019 kg it kept half.",
        "Bug #2019 is closed.",
    ],
)
def test_numbers_that_are_no_later_years(sentence: str) -> None:
    assert found(sentence) == []


@pytest.mark.parametrize(
    "line",
    [
        "Copyright (c) 2012-2019 The Mill",
        "© 2020 The Mill. All rights reserved.",
        "Last updated on 3 March 2019 by the miller",
        "Archives: January 2018 February 2018 March 2018",
        "2016 2017 2018 2019 2020 2021",
        "Events 2019",
    ],
)
def test_page_furniture_is_set_apart(line: str) -> None:
    text = f"{LEAD}\n\n{line}\n"
    mentions = FINDER.find(text)
    assert mentions
    assert {m.setting for m in mentions} == {FURNITURE}
    assert is_furniture(text, text.index(line) + len(line) // 2)


def test_a_cue_far_away_in_a_long_line_excuses_nothing() -> None:
    text = "Cookie notice. " + LEAD * 4 + "Prices fell in 2019, they say. " + LEAD * 4
    assert [m.setting for m in FINDER.find(text)] == [BODY]


@given(st.integers(1, 2100), st.integers(1, 2100))
def test_year_expressions_match_exactly_their_years(low: int, high: int) -> None:
    expression = re.compile(year_expression(min(low, high), max(low, high)))
    for year in (low - 1, low, (low + high) // 2, high, high + 1, 1999, 2000, 2100):
        inside = min(low, high) <= year <= max(low, high)
        assert (expression.fullmatch(str(year)) is not None) == inside


texts = st.text(max_size=200) | st.lists(
    st.sampled_from(
        [
            "2016",
            "2017",
            "2018",
            "2099",
            "in",
            "May",
            "by",
            "©",
            "ChatGPT",
            "COVID-19",
            "CVE-",
            "-",
            "/",
            ".",
            ",",
            "\n",
            "will",
            "12/05/",
            "#",
            "$",
            "FY",
        ]
    ),
    max_size=30,
).map(" ".join)


@settings(max_examples=150)
@given(texts)
def test_the_prefilter_passes_every_text_with_a_mention(text: str) -> None:
    mentions = FINDER.find(text)
    assert len(mentions) <= MAX_PER_DOCUMENT
    assert all(m.day > FINDER.cutoff_day for m in mentions)
    array = pa.array([text], pa.large_string())
    if mentions:
        survey = PlainSurveyor(FINDER).survey(array)
        assert survey.has_year[0] or survey.has_name[0]
    if any(m.kind == ENTITY for m in FINDER.find(text) if "CVE" not in text):
        assert survey.has_name[0]


def test_a_table_of_years_is_not_read_to_its_end() -> None:
    text = "\n".join(f"In {2018 + i % 50} it rained, they say; and so on." for i in range(20_000))
    start = time.perf_counter()
    assert len(FINDER.find(text)) == MAX_PER_DOCUMENT
    assert time.perf_counter() - start < 2


def test_entities_of_a_file_join_the_built_in(tmp_path: Path) -> None:
    path = tmp_path / "names.yaml"
    path.write_text("Great Flood: 2018-04-01\nChatGPT: 2099-01-01\n")
    entities = load_entities(path)
    finder = MentionFinder(CUTOFF, entities)
    assert [m.kind for m in finder.find(LEAD + "After the Great Flood it stood.")] == [ENTITY]
    assert entities["ChatGPT"] == date(2099, 1, 1)
    path.write_text("- a list\n")
    with pytest.raises(ConfigError, match="mapping"):
        load_entities(path)


def test_furniture_shares() -> None:
    page = "Home\nLog in\nSubscribe to our newsletter\n" + "Real text stands here, at length.\n" * 1
    assert 0.3 < furniture_share(page, has_cue=True) < 0.7
    assert furniture_share(LEAD, has_cue=False) == 0.0
    repeated = "\n".join(["The same menu line"] * 30)
    assert furniture_share(repeated, has_cue=False) > 0.9
    assert furniture_share("", has_cue=False) == 0.0
    hit = pc.match_substring_regex(pa.array(["LOG IN now"]), PREFILTER, ignore_case=True)
    assert hit[0].as_py()


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("The price of wheat and the price of rye moved together until the frost", "en"),
        ("Der Preis des Weizens und der Preis des Roggens bewegten sich mit dem Frost", "de"),
        ("Le prix du blé et le prix du seigle ont évolué ensemble dans les années", "fr"),
        ("El precio del trigo y el precio del centeno se movieron con la helada", "es"),
        ("Il prezzo del grano e il prezzo della segale si sono mossi con il gelo", "it"),
        ("De prijs van de tarwe en de prijs van de rogge bewogen met het weer", "nl"),
        ("Цена пшеницы и цена ржи двигались вместе до морозов той зимы", "ru"),
        ("밀의 가격과 호밀의 가격은 그 겨울의 서리까지 함께 움직였다", "ko"),
        ("小麦の価格とライ麦の価格はその冬の霜まで共に動いた", "ja"),
        ("小麦的价格和黑麦的价格一起变动直到那年冬天的霜冻", "zh"),
        ("7 8 9 10 11 12 + - * /", "und"),
        ("", "und"),
    ],
)
def test_languages(text: str, language: str) -> None:
    assert LanguageGuesser().guess(text) == language


@given(st.text(max_size=300))
def test_any_text_has_a_language(text: str) -> None:
    assert 2 <= len(LanguageGuesser().guess(text)) <= 3


LETTERS = "aEeIİKß\u017féÉÀ\u212añÑ\u0130\u01c5\u1ea0\u1ea1\u0161\u0160 \n\t\u00a0\u3000\x1c\x85.©("
furnished = st.lists(
    st.sampled_from(
        ["Copyright", "(C) 2019", "©", "LOG IN", "login", "menu", "\n", "\n\n", "the", "The", "of",
         "and", "für", "FÜR", "é", "été", "Été", "не", "и", "їжак", "小麦", "の", "밀", "ChatGPT",
         "COVID-19", "2019", "2016", "12019", "x" * 250, "tags:", "Read  more", "Read more", "на"]
    )
    | st.text(LETTERS, max_size=8),
    max_size=40,
).flatmap(lambda parts: st.sampled_from([" ", "\n", ""]).map(lambda g: g.join(parts)))  # fmt: skip


@settings(max_examples=200)
@given(texts=st.lists(furnished | st.text(max_size=50), max_size=5), repeats=st.integers(1, 12))
def test_the_compiled_scan_finds_what_the_plain_functions_find(
    texts: list[str], repeats: int
) -> None:
    pytest.importorskip("headrace.corpus._text")
    column = pa.array([*texts, "\n".join(texts * repeats)], pa.large_string())
    assert COMPILED.survey(column) == PLAIN.survey(column)
    rest = column.slice(1)
    assert COMPILED.survey(rest) == PLAIN.survey(rest)


def test_short_names_of_an_entities_file_are_found() -> None:
    pytest.importorskip("headrace.corpus._text")
    finder = MentionFinder(CUTOFF, {"R2": date(2019, 1, 1), "Ünder": date(2020, 1, 1)})
    column = pa.array(["an R2 unit", "Ünder", "under", "R", "", "x R2"], pa.large_string())
    survey = CompiledSurveyor(finder).survey(column)
    assert survey.has_name == [True, True, False, False, False, True]
    assert survey == PlainSurveyor(finder).survey(column)


def test_html_drops_what_is_hidden_and_keeps_blocks() -> None:
    page = (
        "<html><head><title>t</title></head><body><!-- no --><SCRIPT>if (a<b) x()</SCRIPT>"
        "<p>One&nbsp;&amp; two<br>three</p><div>four <b>five</b></div></body></html>"
    )
    assert html_text(page) == "One & two\nthree\nfour five"
    assert html_text("<p>a</p><script>never closed") == "a"


def test_a_page_of_open_tags_takes_no_time() -> None:
    start = time.perf_counter()
    html_text("<script>" * 200_000)
    html_text("<!-- " * 200_000)
    html_text("<" * 500_000)
    assert time.perf_counter() - start < 3
