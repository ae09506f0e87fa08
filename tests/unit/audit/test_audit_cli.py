"""``headrace audit`` and ``headrace embed`` as a user calls them: files, exit codes, messages."""

from __future__ import annotations

import errno
import json
import os

import numpy as np
import polars as pl
import pytest
import yaml

from headrace.audit import read_json
from headrace.audit.published_defects import PublishedOptions
from headrace.audit.recipe import request_from_recipe
from headrace.cli import _run
from headrace.cli.audit import app


@pytest.fixture(scope="module")
def files(tmp_path_factory, small):
    folder = tmp_path_factory.mktemp("cli")
    drawn = small(leak=0.06, seed=1, num_twins=4)
    panel = drawn.panel
    pl.DataFrame(
        {
            "entity": panel.entities[panel.entity],
            "date": panel.sessions[panel.session],
            "label_start": panel.label_start,
            "label_end": panel.label_end,
            "y": panel.y,
            "embedded": panel.embedded,
        }
    ).write_parquet(folder / "panel.parquet")
    np.save(folder / "m.npy", drawn.embedding)
    for name, values in drawn.twins.items():
        np.save(folder / f"{name}.npy", values)
    return folder, drawn


def call(*arguments):
    try:
        return _run("audit", [str(argument) for argument in arguments])
    except SystemExit as stopped:
        return stopped.code


def common(folder, drawn):
    return [
        "--panel", folder / "panel.parquet", "--embeddings", f"m={folder / 'm.npy'}",
        "--cutoff", f"m={drawn.cutoff}", "--shifts", 39, "--no-tables",
    ]  # fmt: skip


def test_a_user_s_own_panel_and_vectors_are_judged(files, tmp_path, capsys):
    folder, drawn = files
    twins = [f"--twin={name}={folder / name}.npy" for name in drawn.twins]
    assert call(*common(folder, drawn), *twins, "--json", tmp_path / "out.json") == 0
    result = read_json(tmp_path / "out.json")
    assert result.models[0].verdict == "knows_the_future"
    assert "m: knows_the_future" in capsys.readouterr().out


def test_lora_and_full_weight_are_compared_with_their_base_and_each_other(files, tmp_path, capsys):
    folder, drawn = files
    names = {"full": "twin 0", "lora": "twin 1"}
    models = [f"--embeddings={name}={folder / file}.npy" for name, file in names.items()]
    wanted = [("m", "full"), ("m", "lora"), ("lora", "full")]
    pairs = [f"--reduction={first}={second}" for first, second in wanted]
    rest = [a for a in common(folder, drawn) if a != "--no-tables"]
    assert call(*rest, *models, *pairs, "--json", tmp_path / "out.json") == 0
    result = read_json(tmp_path / "out.json")
    assert [(pair.base, pair.trained) for pair in result.reductions] == wanted
    printed = capsys.readouterr().out
    assert "lora minus full:" in printed
    assert "matched premium, embargo 5: " in printed
    assert call(*rest, "--reduction=m=m") == 2
    assert call(*rest, "--reduction=m=full", "--reduction=m=full") == 2


def test_json_on_stdout_is_one_object(files, capsys):
    assert call(*common(*files), "--json", "-") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["schema"] == "headrace.audit"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "no panel was given"),
        (["--panel", "missing.parquet"], "no panel file"),
        (["--embeddings", "m"], "not NAME=VALUE"),
        (["--embeddings", "m=missing.npy"], "no such file"),
        (["--cutoff", "other=2020-01-01"], "has no embeddings"),
        (["recipe.yaml", "--panel", "panel.parquet"], "a recipe was given"),
        (["recipe.yaml"], "no recipe at recipe.yaml"),
    ],
)
def test_mistakes_exit_2_with_one_message(files, arguments, words, capsys, monkeypatch):
    folder, _ = files
    monkeypatch.chdir(folder)
    if arguments and arguments[0] in {"--embeddings", "--cutoff"}:
        arguments = ["--panel", "panel.parquet", "--embeddings", "k=m.npy", *arguments]
    assert call(*arguments) == 2
    err = capsys.readouterr().err
    assert words in err
    assert "remedy: " in err


def test_models_of_three_cutoffs_get_a_slope(files, capsys):
    folder, _ = files
    models = []
    for k, month in enumerate(("2015-09", "2015-12", "2016-03")):
        models += ["--embeddings", f"m{k}={folder / 'm.npy'}", "--cutoff", f"m{k}={month}-28"]
    assert call("--panel", folder / "panel.parquet", *models, "--shifts", 39, "--no-tables") == 0
    assert "change a year of knowledge cutoff, entity: 0.0000" in capsys.readouterr().out


def recipe(folder, num_securities=50, **changes):
    content = {
        "panel": {
            "type": "jpx",
            "path": "jpx/stock_prices.csv",
            "sample": "vessl-2026",
            "num_entities": 40,
            "dates_per_entity": 40,
            "synthetic": {
                "num_securities": num_securities,
                "num_delisted": 2,
                "num_listed_late": 2,
            },
        },
        "models": [
            {"name": "planted", "cutoff": "2020-03-31", "synthetic": {"leak": 0.1, "dimension": 16}}
        ],
        "published": {"num_draws": 5, "num_shifts": 19},
        "settings": {"num_shifts": 39, "split_date": "2020-12-31", "tables": False},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(content | changes))
    return path


def test_a_recipe_writes_its_synthetic_file_and_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert call(recipe(tmp_path), "--json", "out.json") == 0
    model = read_json(tmp_path / "out.json").models[0]
    assert model.verdict == "knows_the_future"
    assert model.published.num_draws == 5
    assert (tmp_path / "jpx" / "stock_prices.csv").is_file()
    assert "planted" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"modles": []}, "did you mean 'models'"),
        ({"models": []}, "names no models"),
        ({"models": [{"name": "a"}]}, "give embeddings"),
        ({"models": [{"name": "a", "embeddings": "no.parquet"}]}, "headrace embed"),
        ({"models": [{"name": "a", "synthetic": {"leek": 1}}]}, "did you mean 'leak'"),
        ({"models": [{"name": "a", "synthetic": {"leak": 0.1}}]}, "needs a cutoff"),
        ({"panel": {"type": "jpx"}}, "has no path"),
        ({"panel": {"type": "sql", "path": "x"}}, "neither generic nor jpx"),
        ({"settings": {"num_shift": 39}}, "did you mean 'num_shifts'"),
        ({"published": 3}, "not a mapping"),
        ({"published": {"num_draws": -3}}, "neither may be negative"),
        ({"published": {"facts": 1}}, "has no key 'facts'"),
        ({"published": {"split_date": "2030-12-31"}}, "and 0 after it"),
        ({"settings": {"num_shifts": "many"}}, "settings.num_shifts is 'many'"),
        ({"settings": {"level": "small"}}, "settings.level is 'small'"),
        ({"settings": {"embargoes": 5}}, "settings.embargoes is 5"),
        ({"settings": {"tables": "no, please"}}, "not true or false"),
        ({"reductions": [["planted"]]}, "no pair of models"),
        ({"models": {"name": "a"}}, "models is no list"),
        (
            {"models": [{"name": "a", "cutoff": "2020-03-31", "synthetic": {"leak": 0.6}}]},
            "0.6 of var(y) is planted",
        ),
        (
            {"panel": {"type": "jpx", "path": "x.csv", "num_entities": "all", "synthetic": {}}},
            "num_entities is 'all'",
        ),
    ],
)
def test_recipes_with_mistakes_are_refused_by_key(tmp_path, monkeypatch, changes, words, capsys):
    monkeypatch.chdir(tmp_path)
    path = recipe(tmp_path, num_securities=12, **changes)
    assert call(path) == 2
    assert words in capsys.readouterr().err


def test_dates_and_exponents_are_read_as_yaml_gives_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = recipe(tmp_path, published={})
    text = path.read_text().replace("split_date: '2020-12-31'", "split_date: 2020-12-31")
    path.write_text(text.replace("settings:\n", "settings:\n  level: 5e-2\n"))
    request = request_from_recipe(path)
    assert request.config.split_date == "2020-12-31"
    assert request.config.level == 0.05
    assert request.published == PublishedOptions(facts=request.published.facts)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"panel: [", b"3"])
def test_files_that_are_no_recipes_exit_2(tmp_path, content, capsys):
    path = tmp_path / "recipe.yaml"
    path.write_bytes(content)
    assert call(path) == 2
    assert "recipe.yaml" in capsys.readouterr().err
    assert call(tmp_path) == 2


def test_a_place_that_cannot_be_written_is_said_before_anything_is_computed(
    files, capsys, monkeypatch
):
    folder, _ = files
    monkeypatch.chdir(folder)
    (folder / "file").write_text("")
    os.mkfifo(folder / "pipe")
    given = ["--panel", "panel.parquet", "--embeddings", "k=m.npy"]
    for place in (".", "file/out.json", "pipe"):
        assert call(*given, "--json", place) == 2
        assert "model k" not in capsys.readouterr().err
    assert (folder / "pipe").is_fifo()  # not replaced by a file


def test_a_disk_that_is_full_is_said_and_leaves_the_former_result(
    files, tmp_path, capsys, monkeypatch
):
    folder, _ = files

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    out = tmp_path / "out.json"
    out.write_text("before")
    monkeypatch.setattr("headrace.audit.codec.os.fsync", full)
    given = ["--panel", folder / "panel.parquet", "--embeddings", f"k={folder / 'm.npy'}"]
    assert call(*given, "--shifts", 39, "--no-tables", "--json", out) == 2
    assert "No space left" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["out.json"]
    assert out.read_text() == "before"


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"\x93NUMPY\x01\x00", b"text"])
def test_vectors_of_a_broken_file_are_named(files, tmp_path, content, capsys):
    folder, _ = files
    broken = tmp_path / "broken.npy"
    broken.write_bytes(content)
    panel = folder / "panel.parquet"
    assert call("--panel", panel, "--embeddings", f"k={broken}") == 2
    err = capsys.readouterr().err
    assert "embedding 'k'" in err
    assert "pickle" not in err


def test_help_names_the_verdicts(capsys):
    with pytest.raises(SystemExit) as stopped:
        app(args=["--help"], prog_name="headrace audit")
    assert stopped.value.code == 0
    assert "not_identified" in capsys.readouterr().out
