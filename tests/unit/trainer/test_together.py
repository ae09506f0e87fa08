"""What several ranks refuse, and where they find their place; no process is started."""

from pathlib import Path

import pytest

from headrace.errors import CheckpointError, ConfigError, DamagedCheckpointError
from headrace.parallel.launch import place_of
from headrace.parallel.ranks import Ranks, bind_device
from headrace.trainer import together
from headrace.trainer.config import resolve
from headrace.trainer.together import find_alike, read_alike, refuse_for_ranks, refuse_unlike

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "a", "MASTER_PORT": "1"}  # fmt: skip
SRUN = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "3",
        "SLURM_STEP_NUM_NODES": "1", "SLURM_JOB_ID": "41"}  # fmt: skip


@pytest.fixture
def two():
    """What is asked of a run's ranks before they meet."""
    ranks = Ranks()
    ranks.size = ranks.local_size = 2
    return ranks


@pytest.fixture
def config():
    def make(**changes):
        keys = {"model_config": {"model_type": "qwen3"}, "datasets": [{"path": "x"}]}
        return resolve(keys | {"output_dir": "out", "max_steps": 1} | changes)[0]

    return make


def test_launchers_say_who_a_process_is():
    place = place_of(TORCHRUN)
    assert (place.rank, place.size, place.local_rank, place.local_size) == (3, 4, 1, 2)
    place = place_of(SRUN)
    assert (place.rank, place.size, place.local_rank, place.local_size) == (3, 4, 3, 4)
    assert (place.address, place.port) == ("127.0.0.1", 20041)
    # A batch script is one process, whatever its job has reserved.
    assert place_of({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}).size == place_of({}).size == 1


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (TORCHRUN | {"WORLD_SIZE": "several"}, "WORLD_SIZE is 'several'"),
        (TORCHRUN | {"RANK": "4"}, "process 4 of 4"),
        (TORCHRUN | {"RANK": ""}, "RANK is ''"),
        (TORCHRUN | {"MASTER_ADDR": ""}, "where they meet"),
        (SRUN | {"SLURM_STEP_NUM_NODES": "2", "SLURM_NTASKS_PER_NODE": "2"}, "2 machines"),
    ],
)
def test_variables_that_contradict_each_other_are_refused(environment, message):
    with pytest.raises(ConfigError, match=message):
        place_of(environment)


@pytest.mark.parametrize(
    "keys", [{"lm_eval_tasks": ["lambada"]}, {"engine": {"trace": "trace.json"}}]
)
def test_keys_that_several_ranks_cannot_honour_are_refused(config, two, keys):
    refuse_for_ranks(config(**keys), Ranks())
    with pytest.raises(ConfigError, match="2 ranks"):
        refuse_for_ranks(config(**keys), two)


def test_each_rank_takes_the_gpu_of_its_number(two, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    two.local_rank = 1
    assert bind_device(two, "auto") == bind_device(two, "cuda") == "cuda:1"
    assert bind_device(two, "cpu") == "cpu"
    assert bind_device(Ranks(), "cuda:0") == "cuda:0"
    with pytest.raises(ConfigError, match="one device for 2"):
        bind_device(two, "cuda:0")
    two.local_rank, two.local_size = 2, 3
    with pytest.raises(ConfigError, match="3 processes on a machine with 2 GPUs"):
        bind_device(two, "cuda")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    assert bind_device(two, "cuda") == "cuda:0"


class OfTwo:
    """The second of two ranks, and what the first one said."""

    def __init__(self, told=None, first=0.0):
        self.rank, self.size, self.is_main = 1, 2, False
        self.told, self.first = told, first

    def tell(self, _value):
        return self.told

    def table(self, values):
        return [[self.first], [float(value) for value in values]]


def test_a_rank_with_other_settings_is_refused():
    """It would wait for the others where they never come, or train something else."""
    facts = {"max_length": 64, "model": {"sizes": [1, 2]}, "lora": None}
    refuse_unlike(OfTwo(facts), {**facts, "model": {"sizes": (1, 2)}}, "settings", "the same")
    with pytest.raises(ConfigError, match=r"rank 1 has other settings.*model\.sizes\.1: 2 -> 3"):
        refuse_unlike(OfTwo(facts), {**facts, "model": {"sizes": [1, 3]}}, "settings", "the same")
    with pytest.raises(ConfigError, match=r"k3: 3 -> None, and 3 more"):
        refuse_unlike(OfTwo({f"k{n}": n for n in range(7)}), {}, "settings", "the same")


def test_a_checkpoint_that_one_rank_does_not_see_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(together, "PATIENCE_SECONDS", 0.05)
    with pytest.raises(CheckpointError, match=r"rank 1 does not find .*nowhere") as caught:
        find_alike(OfTwo(), tmp_path / "nowhere")
    assert "share" in caught.value.remedy


def test_a_checkpoint_that_appears_late_is_waited_for(tmp_path, monkeypatch):
    problems = iter(["headrace.json is missing", "model.safetensors has 0 bytes of 8", None])
    monkeypatch.setattr(together, "find_problem", lambda _: next(problems))
    monkeypatch.setattr(together, "PATIENCE_SECONDS", 0.5)
    find_alike(OfTwo(), tmp_path)
    assert next(problems, "all seen") == "all seen"


def damaged():
    raise DamagedCheckpointError("changed", folder=Path("there"))


def test_damage_that_one_rank_finds_is_every_rank_s():
    """Whether another one found it or this one; the next choice is made by all of them."""
    assert read_alike(OfTwo(), lambda: 7, Path("there")) == 7
    with pytest.raises(DamagedCheckpointError, match="rank 0 found there damaged"):
        read_alike(OfTwo(first=1.0), lambda: 7, Path("there"))
    with pytest.raises(DamagedCheckpointError, match="changed"):
        read_alike(OfTwo(), damaged, Path("there"))


def test_damage_that_no_other_choice_repairs_is_not_waited_over():
    """Of a model's folder: the rank that finds it ends the others, which do not come."""
    with pytest.raises(CheckpointError, match="changed") as caught:
        read_alike(OfTwo(), damaged, None)
    assert not isinstance(caught.value, DamagedCheckpointError)
