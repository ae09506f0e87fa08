"""Whole trainings on a CUDA device: the same bits again, saves beside steps, true metrics."""

from __future__ import annotations

import math

import pytest
import torch
from safetensors.torch import load_file

from headrace.trainer.metrics import read_rows
from on_cuda import COMPILED_ON_CUDA

pytestmark = [*COMPILED_ON_CUDA, pytest.mark.slow]

LARGER = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}


@pytest.fixture
def run_on_gpu(run_config, tiny_model):
    """Train a model whose heads attention kernels take, in bfloat16, compiled."""

    def run(**changes):
        keys = {
            "device": "cuda",
            "dtype": "bfloat16",
            "model_config": tiny_model(**LARGER),
            "save_strategy": "steps",
            "save_steps": 4,
        }
        return run_config(**keys | changes)

    return run


def saved(result, step):
    folder = result.output_dir / f"checkpoint-{step}"
    return {
        f"{name}/{key}": tensor.view(torch.uint8)
        for name in ("model.safetensors", "optimizer.safetensors")
        for key, tensor in load_file(folder / name).items()
    }


def differing(a, b):
    assert a.keys() == b.keys()
    return [name for name in a if not torch.equal(a[name], b[name])]


@pytest.mark.parametrize("device_units", [0, 2, 4])
def test_resuming_is_bitwise_and_so_are_saves_beside_steps(run_on_gpu, tmp_path, device_units):
    keys = {"deterministic": True, "engine": {"device_units": device_units}}
    whole = run_on_gpu(output_dir=str(tmp_path / "whole"), async_save=False, **keys)
    half = run_on_gpu(output_dir=str(tmp_path / "half"), **keys)
    assert differing(saved(whole, 4), saved(half, 4)) == []
    resumed = run_on_gpu(
        output_dir=str(tmp_path / "resumed"),
        resume_from_checkpoint=str(half.output_dir / "checkpoint-4"),
        **keys,
    )
    assert differing(saved(whole, 8), saved(resumed, 8)) == []


def test_metrics_say_what_the_device_did(run_on_gpu):
    result = run_on_gpu(engine={"device_units": 1})
    row = read_rows(result.output_dir / "metrics.jsonl")[-1]
    assert 0 < row["mfu"] < 1
    assert row["compile"]["eager_calls"] == 0
    assert row["compile"]["recompilations"] == 0
    exposed = row["exposed_seconds"]
    assert all(math.isfinite(value) and value >= 0 for value in exposed.values())
    assert sum(exposed.values()) <= row["step_seconds"] * 1.01
