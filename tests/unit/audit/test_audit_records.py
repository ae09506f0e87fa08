"""The result file: written whole, read back equal, refused when it is something else."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from headrace.audit import from_dict, read_json, to_dict, write_json
from headrace.audit.records import SCHEMA_VERSION, VERDICTS, Figure
from headrace.errors import DataError

EXAMPLE = Path(__file__).parents[2] / "data" / "audit_example.json"


def figures(value, path="audit"):
    """Every figure of a result with where it stands."""
    if isinstance(value, dict):
        if {"value", "n", "protocol", "stack"} <= set(value):
            yield path, value
        for key, item in value.items():
            yield from figures(item, f"{path}.{key}")
    elif isinstance(value, list):
        for k, item in enumerate(value):
            yield from figures(item, f"{path}[{k}]")


def test_the_example_reads_back_to_the_same_bytes(tmp_path):
    result = read_json(EXAMPLE)
    write_json(result, tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == EXAMPLE.read_bytes()
    assert {model.verdict for model in result.models} <= set(VERDICTS)


def test_every_figure_has_its_n_protocol_and_stack():
    data = json.loads(EXAMPLE.read_text())
    found = list(figures(data))
    assert len(found) > 60
    for path, figure in found:
        assert figure["protocol"], path
        assert all(part in data["stacks"] for part in figure["stack"].split("+")), path
        if figure["value"] is not None:
            assert figure["n"] > 0, path
            has_interval = figure["low"] is not None
            assert has_interval or figure["null"] or figure["note"], f"{path}: bare number"


def test_not_a_number_never_reaches_the_file():
    figure = Figure(
        value=float("nan"), n=1, n_unit="rows", protocol="p", stack="s", low=float("inf")
    )
    assert to_dict(figure)["value"] is None
    assert to_dict(figure)["low"] is None


def change(path, value):
    data = json.loads(EXAMPLE.read_text())
    place = data
    for key in path[:-1]:
        place = place[key]
    if value is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return data


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (["schema"], "other", "not an audit result"),
        (["schema_version"], SCHEMA_VERSION + 1, "schema version"),
        (["models", 0, "verdict"], "guilty", "models.0..verdict"),
        (["models", 0, "name"], 3, "models.0..name"),
        (["panel", "coverage"], ..., "'coverage' is missing"),
        (["models", 0, "skill"], {"common": 1}, "skill.common"),
    ],
)
def test_another_file_is_refused_with_the_place(path, value, words):
    with pytest.raises(DataError, match=words):
        from_dict(change(path, value))


def test_unknown_keys_of_a_later_version_are_passed_over():
    data = json.loads(EXAMPLE.read_text())
    later = copy.deepcopy(data) | {"invented_later": 1}
    assert from_dict(later) == from_dict(data)


def test_files_that_are_no_results_are_refused(tmp_path):
    with pytest.raises(DataError, match="no audit result"):
        read_json(tmp_path / "missing.json")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(DataError, match="not JSON"):
        read_json(tmp_path / "broken.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(DataError, match="list"):
        read_json(tmp_path / "list.json")


def test_a_model_is_found_by_name():
    result = read_json(EXAMPLE)
    assert result.model("base").name == "base"
    with pytest.raises(DataError, match="it has: base"):
        result.model("nobody")
