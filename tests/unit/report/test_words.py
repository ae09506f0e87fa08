"""Numbers as written, headlines, ticks, and the command."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from headrace.audit.records import VERDICTS
from headrace.report import cards, text
from headrace.report.figures import theme


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (0.01234, "0.0123"), (-0.01, f"{text.MINUS}0.0100"), (5.7391, "5.74"), (0, "0"),
        (1234.5, "1,234"),
        (0.00001, f"1.0e{text.MINUS}5"), (None, "—"), (float("nan"), "—"), (float("inf"), "—"),
    ],
)  # fmt: skip
def test_number(value, written):
    assert text.number(value) == written


def test_an_interval_has_one_number_of_decimals():
    written = text.with_interval(-0.09, -0.11, -0.07).replace(text.MINUS, "-")
    assert written == "-0.090 [-0.110, -0.070]"
    assert text.with_interval(0.0012, None, 0.1) == "0.0012"


@pytest.mark.parametrize(
    ("value", "written"), [(0.0004, "p < 0.001"), (0.049, "p = 0.049"), (0.41, "p = 0.41")]
)
def test_p_values_are_never_written_as_zero(value, written):
    assert text.p_value(value) == written


@pytest.mark.parametrize(
    ("verdicts", "words"),
    [
        (["skill"], "m0: skill, and no sign of the future"),
        (["skill", "skill"], "Both models: skill, and no sign of the future"),
        (["no_detectable_skill"] * 3, "All 3 models: no detectable skill"),
        (["skill", "knows_the_future"], "m1 knows the future (1 of 2 models)"),
        (["not_identified", "skill"], "m0: cannot be told apart here; m1: skill, and no sign"),
    ],
)
def test_headline_says_what_was_found(verdicts, words):
    made = [
        cards.Card(
            model=f"m{index}", cutoff=None, verdict=verdict, headline=cards.VERDICTS[verdict][0],
            meaning="", sentences=(), cautions=(), blocks=(),
        )
        for index, verdict in enumerate(verdicts)
    ]  # fmt: skip
    assert cards.headline(made).startswith(words)


def test_every_verdict_of_the_audit_has_words():
    assert set(cards.VERDICTS) == set(VERDICTS)


@given(
    st.floats(-1e6, 1e6, allow_nan=False), st.floats(1e-6, 1e6, allow_nan=False), st.integers(2, 9)
)
def test_ticks_are_inside_few_and_distinct_as_written(low, span, most):
    assume(span > 1e-6 * abs(low))
    marks = theme.ticks(low, low + span, most)
    assert 1 <= len(marks) <= most
    assert marks == sorted(set(marks))
    assert all(low - 1e-6 * span <= mark <= low + span * (1 + 1e-6) for mark in marks) or marks == [
        low
    ]


def test_command_writes_both_files_and_says_the_verdicts(tmp_path, audit_file):
    command = [
        sys.executable, "-m", "headrace", "report", "--audit", str(audit_file), "--out",
        str(tmp_path / "a.html"), "--json", str(tmp_path / "a.json"),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "all-dates: knows_the_future" in done.stdout
    assert json.loads((tmp_path / "a.json").read_text())["schema"] == "headrace.report"
    bad = subprocess.run([*command[:4], "--audit", "none"], capture_output=True, check=False)
    assert bad.returncode == 2
