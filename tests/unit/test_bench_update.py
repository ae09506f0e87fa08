"""`headrace bench update`: small, but the whole of it; figures that fit together."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from headrace.cli.bench import app
from headrace.errors import ConfigError

pytest.importorskip("headrace.kernels.native")


def run(*arguments: str) -> str:
    threads = torch.get_num_threads()
    result = CliRunner().invoke(app, ["update", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    assert torch.get_num_threads() == threads
    return result.stdout


def test_json_holds_consistent_figures():
    figures = json.loads(run("--num-parameters", "1M", "--threads", "2", "--rounds", "3", "--json"))
    assert figures["benchmark"] == "update"
    assert figures["num_parameters"] == 1_000_000
    assert figures["num_threads"] == 2
    assert figures["gigabytes_per_second"] == pytest.approx(26 * figures["gparameters_per_second"])
    assert figures["ratio_to_torch"] == pytest.approx(
        figures["gparameters_per_second"] / figures["torch_gparameters_per_second"]
    )
    best = max(point["gigabytes_per_second"] for point in figures["dram"])
    assert figures["fraction_of_dram"] == pytest.approx(figures["gigabytes_per_second"] / best)
    assert {point["num_threads"] for point in figures["dram"]} == {1, 2}
    for low, middle, high in figures["headrace_seconds"].values():
        assert 0 < low <= middle <= high


def test_text_names_the_ratio():
    text = run("--num-parameters", "1M", "--threads", "1", "--rounds", "1")
    assert "Ratio to torch" in text
    assert "of the best memory rate" in text


def test_too_few_parameters_are_refused():
    with pytest.raises(ConfigError, match="1000"):
        run("--num-parameters", "1k")
