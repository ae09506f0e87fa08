"""Steps are skipped when done, resumed when cut off, and run again when anything changed."""

from __future__ import annotations

import pytest

from headrace.errors import ConfigError
from headrace.quickstart.ledger import Ledger


def run(folder, *, settings=None, fail=None):
    """Two steps, the second after the first; returns what ran and whether it was a resume."""
    ran = []

    def action(name):
        def act(resumed):
            ran.append((name, resumed))
            if fail == name:
                raise KeyboardInterrupt

        return act

    settings = settings or {}
    with Ledger(folder, num_steps=2, say=lambda _: None) as ledger:
        ledger.step("a", "A", action("a"), settings={"x": settings.get("a", 1)})
        ledger.step("b", "B", action("b"), settings={"y": settings.get("b", 1)}, after=("a",))
    return ran


def test_done_steps_are_not_repeated(tmp_path):
    assert run(tmp_path) == [("a", False), ("b", False)]
    assert run(tmp_path) == []


def test_a_step_that_was_cut_off_is_resumed_and_earlier_ones_are_kept(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, fail="b")
    assert run(tmp_path) == [("b", True)]


def test_changed_settings_repeat_the_step_and_all_that_depends_on_it(tmp_path):
    run(tmp_path)
    assert run(tmp_path, settings={"b": 2}) == [("b", False)]
    assert run(tmp_path, settings={"a": 2, "b": 2}) == [("a", False), ("b", False)]


def test_a_damaged_mark_costs_the_step_and_nothing_else(tmp_path):
    run(tmp_path)
    (tmp_path / ".steps" / "a.json").write_text("{")
    assert run(tmp_path) == [("a", False)]


def test_a_folder_with_other_files_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(ConfigError, match="holds files"):
        run(tmp_path)


def test_two_runs_in_one_folder_are_refused_and_the_lock_ends_with_the_run(tmp_path):
    with Ledger(tmp_path, num_steps=1, say=print), pytest.raises(ConfigError, match="another"):
        run(tmp_path)
    assert run(tmp_path)


def test_a_file_in_the_way_is_refused(tmp_path):
    (tmp_path / "out").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        run(tmp_path / "out")
