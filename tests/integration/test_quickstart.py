"""The quickstart end to end at tiny size: real sources, every real part, seconds."""

from __future__ import annotations

import io
import json
import os
import signal
import xml.etree.ElementTree as ET
from datetime import date

import pytest
from rich.console import Console

from headrace.cli import main
from headrace.cli import quickstart as verb
from headrace.engine import Engine
from headrace.errors import ConfigError
from headrace.quickstart import run, sources
from headrace.quickstart.panel import PanelConfig
from headrace.quickstart.settings import ModelShape, QuickstartConfig

SHAPE = ModelShape(
    vocab_size=384, hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=1, mlp_size=32
)

LONGER = PanelConfig(first=date(2006, 1, 1), last=date(2007, 12, 31), num_entities=5)


@pytest.fixture(scope="module")
def short_texts():
    """The real addresses since 1970, each cut to 2,000 characters."""
    whole = sources.write_documents

    def write(out):
        whole(out)
        rows = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
        rows = [row | {"text": row["text"][:2000]} for row in rows if row["published_at"] > "1970"]
        out.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
        return len(rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "write_documents", write)
        yield


def tiny(folder, **changes):
    return QuickstartConfig(
        output_dir=folder,
        **{
            "steps": 3,
            "shape": SHAPE,
            "panel": PanelConfig(first=date(2006, 6, 1), last=date(2007, 8, 1), num_entities=5),
            "num_twins": 2,
            "max_length": 64,
            "rows_per_step": 2,
            "num_shifts": 19,
            **changes,
        },
    )


def go(config, capsys):
    result = run.quickstart(config, Console(no_color=True, width=200))
    return result, capsys.readouterr().out


@pytest.fixture(scope="module")
def finished(tmp_path_factory, short_texts):
    folder = tmp_path_factory.mktemp("quickstart") / "work"
    return folder, run.quickstart(tiny(folder), Console(file=io.StringIO()))


def test_it_leaves_a_report_that_names_both_models_and_their_runs(finished):
    _, result = finished
    html = result.report.read_text(encoding="utf-8")
    ET.fromstring(html.split("\n", 1)[1])
    data = json.loads(result.report_json.read_text(encoding="utf-8"))
    assert list(result.verdicts) == ["cutoff-2006", "all-dates"]
    assert data["headline"] == result.headline
    assert {source["kind"] for source in data["sources"]} == {
        "corpus manifest", "training run", "training metrics", "audit record"
    }  # fmt: skip
    shown = {block["picture"] for section in data["sections"] for block in section["blocks"]
             if "picture" in block}  # fmt: skip
    assert {"dates-0", "loss", "speed"} <= shown
    assert all(caveat in html.replace("&#39;", "'") for caveat in sources.PRICE_CAVEATS)


def test_nothing_after_the_cutoff_reaches_the_first_model(finished):
    folder, _ = finished
    manifests = {
        name: json.loads((folder / "corpus" / name / "manifest.json").read_text("utf-8"))
        for name in ("cutoff-2006", "all-dates")
    }
    assert max(row["month"] for row in manifests["cutoff-2006"]["histogram"]) <= "2006-12"
    assert max(row["month"] for row in manifests["all-dates"]["histogram"]) > "2020"
    assert manifests["cutoff-2006"]["tokenizer"] == manifests["all-dates"]["tokenizer"]
    for name, manifest in manifests.items():
        trained = json.loads((folder / "runs" / name / "run.json").read_text("utf-8"))
        (dataset,) = trained["datasets"]
        assert dataset["num_documents"] == manifest["counts"]["documents"]


def test_a_second_run_repeats_nothing_and_a_changed_seed_not_the_text(
    finished, short_texts, capsys
):
    folder, first = finished
    before = (folder / "audit.json").read_bytes()
    again, out = go(tiny(folder), capsys)
    assert out.count("done before") == 7
    assert again.verdicts == first.verdicts
    assert (folder / "audit.json").read_bytes() == before
    _, out = go(tiny(folder, seed=1), capsys)
    done = [line for line in out.splitlines() if "done before" in line]
    assert [line.split("]")[0] for line in done] == ["[1/8", "[2/8", "[5/8"]


def test_a_run_cut_off_goes_on_where_it_was(tmp_path, short_texts, capsys, monkeypatch):
    config = tiny(tmp_path / "work")

    def cut_off(*_arguments, **_more):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(run, "embed_networks", cut_off)
        with pytest.raises(KeyboardInterrupt):
            go(config, capsys)
    capsys.readouterr()
    result, out = go(config, capsys)
    assert out.count("done before") == 5
    assert result.report.is_file()


def test_a_model_folder_is_continued_and_compared_with_itself(
    finished, tmp_path, short_texts, capsys
):
    folder, _ = finished
    base = next((folder / "runs" / "all-dates").glob("checkpoint-*"))
    result, _ = go(
        tiny(tmp_path / "work", model=base, model_cutoff=date(2010, 1, 1), panel=LONGER), capsys
    )
    assert list(result.verdicts) == ["continued-2006", "base"]
    audit = json.loads((tmp_path / "work" / "audit.json").read_text("utf-8"))
    assert audit["models"][0]["cutoff"] == "2010-01-01"  # training moves no cutoff back
    (reduction,) = audit["reductions"]
    assert (reduction["base"], reduction["trained"]) == ("base", "continued-2006")


def test_a_model_that_is_not_there_is_refused(tmp_path, short_texts, capsys):
    with pytest.raises(ConfigError, match="no weights there"):
        go(tiny(tmp_path / "work", model=tmp_path), capsys)


def test_the_command_ends_with_verdict_and_path(tmp_path, capsys, monkeypatch):
    asked = {}

    def pretend(config, console):
        asked.update(config=config, console=console)
        return run.QuickstartResult(
            report=tmp_path / "report.html", report_json=tmp_path / "report.json",
            headline="a: skill", verdicts={"a": "skill"}, seconds=1.0, step_seconds={},
            peak_rss_bytes=1 << 30,
        )  # fmt: skip

    monkeypatch.setattr(run, "quickstart", pretend)
    verb.app(["--output-dir", str(tmp_path), "--steps", "7"], standalone_mode=False)
    lines = capsys.readouterr().out.splitlines()
    assert "  a: skill" in lines
    assert lines[-1] == f"report: {tmp_path / 'report.html'}"
    assert asked["config"].num_steps == 7
    verb.app(["--output-dir", str(tmp_path), "--json"], standalone_mode=False)
    assert json.loads(capsys.readouterr().out)["verdicts"] == {"a": "skill"}
    assert asked["console"].stderr


@pytest.mark.parametrize("where", ["embeddings", "training"])
def test_ctrl_c_says_a_line_and_the_same_command_goes_on(
    where, tmp_path, short_texts, capsys, monkeypatch
):
    """Exit code 130; in training the step is finished and saved first."""
    whole, step = run.quickstart, Engine.step
    config = tiny(tmp_path / "work")
    monkeypatch.setattr(run, "quickstart", lambda _config, console: whole(config, console))

    def asked(*_arguments, **_more):
        os.kill(os.getpid(), signal.SIGINT)

    def step_asked(self, *arguments, **settings):
        in_a_run = signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        if in_a_run and self.state.optimizer_step == 1:
            asked()
        return step(self, *arguments, **settings)

    with monkeypatch.context() as patch:
        if where == "training":
            patch.setattr(Engine, "step", step_asked)
        else:
            patch.setattr(run, "embed_networks", asked)
        with pytest.raises(SystemExit) as ended:
            main(["quickstart", "--output-dir", str(config.output_dir)])
    assert ended.value.code == 130
    err = capsys.readouterr().err.splitlines()
    said = [line for line in err if line.startswith("headrace quickstart: ")]
    assert len(said) == 1, err
    assert "the same command goes on from there" in said[0]
    with pytest.raises(SystemExit) as ended:
        main(["quickstart", "--output-dir", str(config.output_dir)])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert out.count("done before") == (5 if where == "embeddings" else 2)
    assert ("checkpoint-2, step 2" in out) == (where == "training"), out
