"""What several ranks refuse, and where they find their place; no process is started."""

import pytest

from headrace.errors import ConfigError
from headrace.parallel.launch import place_of
from headrace.parallel.ranks import Ranks, bind_device
from headrace.trainer.config import resolve
from headrace.trainer.together import refuse_for_ranks

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
