"""Ranks of which one is told, given or shown something else: all end alike, and it is said once."""

import json
import signal

import pytest
import yaml

import one_rank
from forked import Forked, wait_for

pytestmark = pytest.mark.multirank


@pytest.fixture
def forked(tmp_path_factory):
    ranks = Forked(tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.close()


@pytest.fixture
def config_file(make_config, tmp_path):
    def write(**changes):
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(make_config(progress="lines", **changes)))
        return path

    return write


def said(outputs):
    return "".join(outputs).count("headrace train: ")


@pytest.mark.parametrize(
    ("number", "code", "to"), [(signal.SIGTERM, 143, [1]), (signal.SIGINT, 130, [0, 1])]
)
def test_a_signal_while_the_run_is_prepared_ends_all(
    forked, config_file, tmp_path, number, code, to
):
    """With its code, in a line of one rank: the others would wait for what one alone knows."""
    ranks = forked.start("train", config_file(), before=one_rank.slow_to_load)
    wait_for(ranks[1], "loading")
    for rank in to:
        ranks[rank].send_signal(number)
    codes, outputs = forked.ends()
    assert codes == [code, code], outputs
    assert said(outputs) == 1, outputs
    assert f"stopped by {number.name} before the first step" in "".join(outputs)
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]


@pytest.mark.parametrize(
    ("only", "before", "message"),
    [
        ("max_length=32", None, "rank 1 has other settings than rank 0"),
        (None, one_rank.reads_other_documents, "rank 1 has other data than rank 0"),
        (None, one_rank.has_another_model, "the model's config.hidden_act: silu -> gelu"),
        ("--jsn", None, "No such option"),
    ],
    ids=["another key", "other documents", "another model", "another command"],
)  # fmt: skip
def test_a_rank_that_would_do_something_else_is_refused(forked, config_file, only, before, message):
    forked.start("train", config_file(), only=only, before=before)
    codes, outputs = forked.ends()
    assert codes == [2, 2], outputs
    assert said(outputs) == 1, outputs
    assert message in "".join(outputs)


@pytest.mark.parametrize(
    "command", [["--jsn"], [], ["nowhere.yaml"]], ids=["mistyped", "without a file", "no file"]
)
def test_a_mistyped_command_is_said_once(forked, command):
    forked.start("train", *command)
    codes, outputs = forked.ends()
    assert codes == [2, 2], outputs
    assert said(outputs) == 1, outputs


def test_only_the_rank_that_writes_needs_a_folder_to_write_to(forked, config_file, tmp_path):
    forked.start("train", config_file(max_steps=2), before=one_rank.cannot_write)
    codes, outputs = forked.ends()
    assert codes == [0, 0], outputs
    resumed = config_file(max_steps=3, resume_from_checkpoint="auto")
    forked.start("train", resumed, before=one_rank.sees_no_checkpoint)
    codes, outputs = forked.ends()
    assert codes == [1, 1], outputs
    assert said(outputs) == 1, outputs
    assert "rank 1 does not find" in outputs[1]


def test_what_ends_the_main_rank_in_a_callback_is_every_rank_s_code(forked, config_file):
    forked.start("train", config_file(), before=one_rank.exits_in_a_callback)
    codes, outputs = forked.ends()
    assert codes == [7, 7], outputs


def test_a_disk_that_is_full_beside_a_step_ends_all(forked, config_file):
    """The others wait for the save before they take the step in which the main one waits."""
    saves = {"save_strategy": "steps", "save_steps": 2}
    forked.start("train", config_file(**saves), before=one_rank.cannot_save)
    codes, outputs = forked.ends()
    assert codes == [3, 3], outputs
    assert "is full (optimizer.safetensors)" in outputs[0]


def test_damage_that_one_rank_finds_is_passed_over_by_all(
    forked, run_config, config_file, tmp_path
):
    """The others would be on their way to load what this one has given up."""
    saves = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    run_config(**saves)
    resumed = config_file(**saves | {"max_steps": 3}, resume_from_checkpoint="auto")
    forked.start("train", resumed, before=one_rank.reads_damage)
    codes, outputs = forked.ends()
    assert codes == [0, 0], outputs
    assert (tmp_path / "run" / "checkpoint-2.damaged").is_dir()
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["sessions"][-1]["first_step"] == 1


def test_processes_of_runs_of_other_sizes_do_not_wait_for_each_other(forked, config_file):
    """They have not met, so each says for itself what it found."""
    other = {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}
    forked.start("train", config_file(), environ={1: other})
    codes, outputs = forked.ends()
    assert codes == [2, 2], outputs
    assert all("WORLD_SIZE" in output for output in outputs)
