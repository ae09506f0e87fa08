"""Reading a corpus: summary, look-ups, verification, differences, the page, the command line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from headrace.cli.corpus import app
from headrace.corpus.differences import describe_diff, diff_manifests
from headrace.corpus.inspect import by_period, describe, find_text, verify
from headrace.corpus.page import page
from headrace.errors import ConfigError, DataError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from headrace.corpus.manifest import Manifest

TOKENIZER = {"train": "bpe", "vocab_size": 300}


@pytest.fixture
def source(tmp_path: Path, write_jsonl: Callable[..., Path], prose: Callable[..., str]) -> Path:
    rows = [
        {"id": f"<d{i}>", "text": prose(i), "date": f"{2010 + i // 12}-{1 + i % 12:02d}-15"}
        for i in range(60)
    ]
    rows[7]["text"] += " The Weir of Köln & <b>more</b>. In 2019 it fell, as they wrote."
    return write_jsonl(tmp_path / "in.jsonl", rows)


@pytest.fixture
def corpus(build: Callable[..., Manifest], source: Path) -> Manifest:
    cutoffs = {"2012": "2012-12-31", "2014": "2014-06-30"}
    return build({"path": str(source), "name": "mill"}, cutoffs=cutoffs, tokenizer=TOKENIZER)


def test_the_summary_names_vintages_sources_months_and_checks(corpus: Manifest) -> None:
    text = describe(corpus)
    for word in ("2012", "2014", "mill", "after the cutoff", "future mentions", "available at"):
        assert word in text
    assert "54 documents" in text


def test_histograms_show_the_gaps_between_periods() -> None:
    rows = [
        {"source": "a", "month": "2010-11", "tokens": 5, "bytes": 9},
        {"source": "b", "month": "2011-02", "tokens": 7, "bytes": 9},
    ]
    assert by_period(rows) == [
        ("2010-11", {"a": 5}), ("2010-12", {}), ("2011-01", {}), ("2011-02", {"b": 7}),
    ]  # fmt: skip
    assert [name for name, _ in by_period(rows, most=3)] == ["2010", "2011"]
    assert [name for name, _ in by_period(rows, most=1)] == ["2010s"]
    assert [name for name, _ in by_period(rows, width=120)] == ["2010s"]


def test_texts_are_found_with_their_instants(corpus: Manifest) -> None:
    (found,) = find_text(corpus, "Weir of Köln")
    assert found["doc_id"] == "<d7>"
    assert found["available_at"] == "2010-08-15T23:59:59.999999Z"
    assert "Weir of Köln" in found["snippet"]
    assert found["position"] == 8
    assert list(find_text(corpus, "weir of köln")) == []
    assert len(list(find_text(corpus, "weir of köln", ignore_case=True))) == 1
    assert len(list(find_text(corpus, "mill", limit=3))) == 3
    with pytest.raises(DataError):
        list(find_text(corpus, ""))


def test_every_file_is_verified(corpus: Manifest) -> None:
    assert verify(corpus) > 10
    shard = next(corpus.vintages[0].documents_dir.iterdir())
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.unlink()
    shard.write_bytes(bytes(content))
    with pytest.raises(DataError, match="is not the file"):
        verify(corpus)
    shard.unlink()
    with pytest.raises(DataError, match="missing"):
        verify(corpus)


def test_differences(corpus: Manifest, build: Any, source: Path) -> None:
    early, late = corpus.vintages
    assert describe_diff(diff_manifests(early, early)) == "the two corpora are the same"
    diff = diff_manifests(early, late)
    assert diff["counts"]["documents"] == [36, 54]
    assert {"source": "mill", "month": "2013-01", "documents": [0, 1]} in diff["histogram"]
    told = describe_diff(diff)
    for line in (
        "settings: the same", "inputs: the same", "tokenizer: the same", "  mill 2013: +12",
    ):  # fmt: skip
        assert line in told.splitlines()
    assert re.search(r"documents +36 -> +54  \(\+18\)", told)
    back = describe_diff(diff_manifests(late, early))
    assert "  mill 2014: -6" in back.splitlines()
    assert re.search(r"documents +54 -> +36  \(-18\)", back)
    other = build(
        {"path": str(source), "name": "mill"},
        output="other",
        cutoff="2012-12-31",
        checks={"length": {"min_chars": 5}},
        tokenizer=str(early.tokenizer_dir),
    )
    diff = diff_manifests(early, other)
    assert diff["identical"] is False or diff["settings"]
    assert diff["settings"]["checks.length.min_chars"] == [1, 5]
    assert "checks.length.min_chars: 1 -> 5" in describe_diff(diff)


def test_many_months_are_told_by_years() -> None:
    months = [
        {"source": "a", "month": f"{year}-{month:02d}", "documents": [year % 2, 2]}
        for year in range(2000, 2004)
        for month in range(1, 13)
    ]
    months.append({"source": "b", "month": "1950-01", "documents": [5, 3]})
    same = {"settings": {}, "rule_versions": {}, "counts": {}, "sources": {}, "checks": {}}
    diff = {"identical": False, "cutoff": None, "tokenizer": None, "inputs": {}, **same}
    lines = describe_diff({**diff, "histogram": months}).splitlines()
    assert lines[-5:] == ["  a 2000: +24", "  a 2001: +12", "  a 2002: +24", "  a 2003: +12",
                          "  b 1950-01: -2"]  # fmt: skip


class _Tags(HTMLParser):
    """Every tag that is opened is closed; nothing is fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in {"script", "link", "img", "iframe"}
        assert not any(name == "src" for name, _ in attrs)
        if tag not in {"meta", "br"}:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        del attrs
        assert tag == "line"

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_escaped(corpus: Manifest) -> None:
    text = page(corpus)
    parser = _Tags()
    parser.feed(text.removeprefix("<!doctype html>"))
    parser.close()
    assert parser.open == []
    assert "<b>more</b>" not in text
    assert "http" not in re.sub(r"xmlns='[^']*'", "", text)
    assert "&lt;d7&gt;" in text
    assert text.count("<svg") == 2


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(words))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout


def test_the_command_line_builds_and_inspects(tmp_path: Path, source: Path) -> None:
    recipe = tmp_path / "c.yaml"
    recipe.write_text(
        f"output_dir: {tmp_path}/c\ncutoff: 2012-12-31\n"
        f"sources: [{{name: s, type: jsonl, path: {source}, available_at: date}}]\n"
    )
    code, out = run("build", str(recipe), "cutoff=2011-12-31", "--workers", "1", "--json")
    assert code == 0
    assert json.loads(out)["counts"]["documents"] == 24
    code, out = run("build", str(recipe), "--workers", "1")
    assert "36 documents" in out
    code, out = run("inspect", f"{tmp_path}/c", "--find", "Köln", "--json")
    assert json.loads(out)["found"][0]["doc_id"] == "<d7>"
    code, out = run("inspect", f"{tmp_path}/c", "--verify", "--html", f"{tmp_path}/out/c.html")
    assert "files are as the manifest says" in out
    assert (tmp_path / "out" / "c.html").read_text().startswith("<!doctype html>")
    code, out = run("inspect", f"{tmp_path}/c", "--diff", f"{tmp_path}/c")
    assert "the same" in out
    code, out = run("inspect", f"{tmp_path}/c", "--by", "year")
    assert "   2012 #" in out
    with pytest.raises(ConfigError, match="no period"):
        run("inspect", f"{tmp_path}/c", "--by", "week")
    with pytest.raises(ConfigError):
        run("inspect", str(tmp_path / "nothing"))


def test_errors_have_their_exit_code_and_help_needs_no_pyarrow(tmp_path: Path) -> None:
    def headrace(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "headrace", "corpus", *words],
            capture_output=True, text=True, check=False,
            env={"PYTHONPATH": ":".join(sys.path), "PATH": "/usr/bin", "NO_COLOR": "1"},
        )  # fmt: skip

    result = headrace("build", str(tmp_path / "none.yaml"))
    assert result.returncode == 2
    assert "no configuration file" in result.stderr
    code = (
        "import sys; import headrace.cli.corpus; "
        "sys.exit('pyarrow' in sys.modules or 'pydantic' in sys.modules)"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], check=False, env={"PYTHONPATH": ":".join(sys.path)}
    )
    assert found.returncode == 0
