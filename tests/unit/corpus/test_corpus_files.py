"""Folders appear whole or not at all, and an old corpus stays until the new one stands."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from headrace.corpus import files
from headrace.corpus.files import (
    is_whole,
    put_in_place,
    remove_temporaries,
    whole_folder,
    write_json,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def test_a_folder_that_fails_half_way_leaves_nothing(tmp_path: Path) -> None:
    place = tmp_path / "piece"

    def fill() -> None:
        with whole_folder(place) as folder:
            (folder / "a").write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fill()
    assert list(tmp_path.iterdir()) == []
    assert not is_whole(place)


def test_a_folder_with_a_short_file_is_not_whole(tmp_path: Path) -> None:
    place = tmp_path / "piece"
    with whole_folder(place) as folder:
        (folder / "a").write_text("content")
    assert is_whole(place)
    (place / "a").write_text("cont")
    assert not is_whole(place)
    (place / "a").unlink()
    assert not is_whole(place)


def test_what_killed_runs_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / "units" / ".tmp-x.12").mkdir(parents=True)
    (tmp_path / ".tmp-y").write_text("")
    (tmp_path / "units" / "kept").mkdir()
    remove_temporaries(tmp_path)
    assert [p.name for p in tmp_path.rglob("*")] == ["units", "kept"]


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_new_folder_replaces_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, exchanges: bool
) -> None:
    if not exchanges:
        monkeypatch.setattr(files, "_exchange", lambda *_: False)
    place = tmp_path / "place"
    for content in ("old", "new"):
        built = tmp_path / "building"
        built.mkdir()
        (built / "a").write_text(content)
        put_in_place(built, place)
        assert (place / "a").read_text() == content
        assert [p.name for p in tmp_path.iterdir()] == ["place"]


def test_json_files_are_written_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"b": 1})

    def fails(*_: Any) -> None:
        raise OSError(5, "input/output error")

    monkeypatch.setattr(files, "sync_file", fails)
    with pytest.raises(OSError, match="input/output"):
        write_json(path, {"b": 2})
    assert json.loads(path.read_text()) == {"b": 1}


def test_an_unwritable_place_is_an_error_and_not_a_loss(
    build: Callable[..., Any], tmp_path: Path, write_jsonl: Any, prose: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    rows = [{"text": prose(i), "date": "2014-01-01"} for i in range(5)]
    source = {"path": str(write_jsonl(tmp_path / "a.jsonl", rows))}
    first = build(source)
    before = (first.path / "manifest.json").read_text()

    def fails(*_: Any) -> None:
        raise PermissionError

    monkeypatch.setattr("headrace.corpus.publish.put_in_place", fails)
    with pytest.raises(PermissionError):
        build(source, cutoff="2015-12-31")
    assert (first.path / "manifest.json").read_text() == before
