"""What people read: one line an interval, or a panel on a terminal."""

import io

import pytest
from rich.console import Console

from headrace.trainer.display import describe, make_display, sparkline

ROW = {
    "step": 10, "epoch": 0.5, "loss": 3.14159, "learning_rate": 3e-4, "grad_norm": 0.75,
    "tokens_per_second": 12_345.0, "supervised_tokens_per_second": 12_000.0,
    "interval_steps": 5, "step_seconds": 2.0, "num_tokens": 1_000_000,
    "num_supervised_tokens": 999_000, "num_skipped_steps": 0,
    "exposed_seconds": {"h2d": 0.01, "update": 4.0},
}  # fmt: skip


def test_a_line_holds_the_figures_of_its_row():
    line = describe(ROW, 40)
    assert line == (
        "step 10/40  loss 3.1416  lr 3.00e-04  gradient norm 0.750  12.3k tokens/s  "
        "waits 40% for update"
    )
    evaluated = describe({"step": 10, "epoch": 1.0, "eval_loss": 2.5}, 40)
    assert evaluated == "step 10/40  eval loss 2.5000"
    bad = describe(ROW | {"loss": None, "grad_norm": None, "num_skipped_steps": 2}, 40)
    assert "gradient not finite" in bad
    assert "2 skipped" in bad
    assert "loss" not in bad


def test_files_get_lines_without_control_characters():
    out = io.StringIO()
    display = make_display("auto", Console(file=out), num_steps=40, title="run")
    display.step(10, 2.0)
    display.row(ROW)
    display.say("saved run/checkpoint-10 [bold]not markup[/bold]")
    display.close()
    text = out.getvalue()
    assert "\x1b" not in text
    assert text.count("\n") == 2
    assert "1 min 00 s left" in text
    assert "[bold]not markup[/bold]" in text


@pytest.mark.parametrize("kind", ["auto", "live"])
def test_terminals_get_a_panel(kind):
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=90)
    display = make_display(kind, console, num_steps=40, title="my run")
    display.step(9, 2.0)
    display.row(ROW)
    display.row(ROW | {"step": 20, "loss": 2.0, "eval_loss": 2.25})
    display.row({"step": 21, "epoch": 1.0, "eval_loss": 2.2})
    display.say("saved checkpoint-20")
    display.close()
    text = out.getvalue()
    for shown in ("my run", "step 21/40", "2.0000", "2.2000", "saved checkpoint-20", "update"):
        assert shown in text, shown


def test_none_shows_nothing():
    out = io.StringIO()
    display = make_display("none", Console(file=out), num_steps=40, title="run")
    display.row(ROW)
    display.say("x")
    display.close()
    assert out.getvalue() == ""


def test_sparkline():
    assert sparkline([1.0, 2.0, 8.0]) == "▁▂█"
    assert sparkline([3.0, 3.0]) == "▁▁"
    assert sparkline([float("nan")]) == ""
