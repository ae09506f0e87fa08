"""Processes as a launcher starts them: the command line, signals, and ranks that fail or die."""

import json
import re
import signal
import subprocess
import sys
import time

import pytest
import yaml

from forked import Forked

pytestmark = pytest.mark.multirank

PATIENCE = 120.0
# A run one of whose ranks fails in its third step, while a checkpoint is being written.
FAILING = """
import os, sys, time
from headrace.cli import main
from headrace.engine import Engine
from headrace.errors import CapacityError
from headrace.store.gathered import GatheredSource

gather = GatheredSource._gather
def slowly(self, unit):
    time.sleep(0.5)
    return gather(self, unit)
GatheredSource._gather = slowly

step = Engine.step
def failing(self, *arguments, **settings):
    fails = self.ranks.rank == int(os.environ["FAILS"])
    if self.ranks.size == 2 and fails and self.state.optimizer_step == 2:  # not in the self-test
        raise CapacityError("the memory is gone")
    return step(self, *arguments, **settings)
Engine.step = failing
main(["train", sys.argv[1]])
"""

# A run whose second rank is short of memory after its first step.
SHORT = """
import os, sys
from headrace.cli import main
from headrace.errors import CapacityError
from headrace.trainer.failures import MemoryWatch

if os.environ["RANK"] == "1":
    MemoryWatch.shortage = lambda _: CapacityError("1 KiB of host memory is left")
main(["train", sys.argv[1]])
"""


@pytest.fixture
def config_file(make_config, tmp_path):
    """A run that would go on for minutes."""

    def write(**changes):
        config = make_config(max_steps=100_000, progress="lines", **changes)
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(config))
        return path

    return write


@pytest.fixture
def ranks(tmp_path):
    forked = Forked(tmp_path)
    yield forked
    forked.close()


def wait_for_steps(folder, count, processes):
    """Until the run has logged so many steps."""
    metrics = folder / "metrics.jsonl"
    deadline = time.monotonic() + PATIENCE
    while not metrics.is_file() or metrics.read_text().count("\n") < count:
        assert time.monotonic() < deadline, "no steps"
        for process in processes:
            assert process.exit_code is None, process.said()
        time.sleep(0.1)


def test_torchrun_trains(make_config, tmp_path):
    """The command of the documentation, for two steps."""
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(make_config(progress="lines")))
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *command, "-m", "headrace", "train", path, "max_steps=2", "--json"],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["status"] == "finished"  # of the main rank alone
    assert done.stderr.count("finished at step 2/2") == 1
    assert (tmp_path / "run" / "checkpoint-2" / "headrace.json").is_file()


def test_a_signal_to_the_last_rank_saves_and_ends_all(config_file, ranks, tmp_path):
    """With the documented code, and a checkpoint of the step that all of them finished."""
    processes = ranks.start("train", config_file(requeue=True))
    wait_for_steps(tmp_path / "run", 2, processes)
    processes[1].send_signal(signal.SIGTERM)
    codes, outputs = ranks.ends()
    assert codes == [75, 75], outputs
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["status"] == "stopped"
    assert (tmp_path / "run" / f"checkpoint-{record['sessions'][0]['last_step']}").is_dir()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_fails_ends_the_others_with_its_reason(
    config_file, ranks, tmp_path, monkeypatch, rank
):
    """And its exit code, also where it keeps the store they meet at; a save is under way."""
    monkeypatch.setenv("FAILS", str(rank))
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    saves = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 1}
    ranks.start(script, config_file(async_save_memory=2**30, **saves))
    codes, outputs = ranks.ends()
    assert codes == [3, 3], outputs
    assert f"rank {rank} failed: the memory is gone" in outputs[1 - rank]
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "failed"


def test_a_rank_whose_memory_runs_short_ends_the_others_with_its_reason(
    config_file, ranks, tmp_path
):
    """All of them save first; the one that has room leaves the word to the one that has none."""
    script = tmp_path / "short.py"
    script.write_text(SHORT)
    ranks.start(script, config_file())
    codes, outputs = ranks.ends()
    assert codes == [3, 3], outputs
    assert "rank 1 failed: 1 KiB of host memory is left" in outputs[0]
    assert (tmp_path / "run" / "checkpoint-1" / "headrace.json").is_file()


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_is_killed_is_named_by_every_other_one(config_file, ranks, tmp_path, rank):
    """No word of its own: who left, in which step, how to go on; nothing of gloo's, once a rank."""
    saves = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 1}
    processes = ranks.start("train", config_file(**saves), size=3)
    wait_for_steps(tmp_path / "run", 9, processes)
    processes[rank].kill()
    started_waiting = time.monotonic()
    codes, outputs = ranks.ends()
    assert time.monotonic() - started_waiting < 30
    survivors = [0, 1, 2]
    survivors.remove(rank)
    for other in survivors:
        said = outputs[other]
        assert codes[other] == 1, said
        assert len(re.findall(rf"rank {rank}\b.* left the run (in|after) step \d+", said)) == 1, (
            said
        )
        assert said.count("headrace train: ") == 1
        last = said.partition("headrace train: ")[2]
        assert "resume_from_checkpoint=auto on the same command goes on from" in last
        assert not re.search("gloo|Traceback|TCPStore|frame #", said), said


@pytest.mark.parametrize(
    ("only", "message"),
    [
        (None, "unknown key max_step; did you mean max_steps?"),
        ("lora_r=2", "lora_r"),
        ("datasets.0.path=nowhere.jsonl", "dataset 'nowhere.jsonl' does not exist"),
    ],
    ids=["before they meet, all", "before they meet, one", "while it is prepared, one"],
)
def test_a_bad_configuration_is_said_once(config_file, ranks, only, message):
    """By the first rank that has it; all end, with its code."""
    command = ["train", config_file()]
    if only is None:
        command.append("max_step=3")
    ranks.start(*command, only=only)
    codes, outputs = ranks.ends()
    assert codes == [2, 2], outputs
    said = "".join(outputs)
    assert said.count("headrace train: ") == 1, outputs
    assert message in said.partition("headrace train: ")[2]
