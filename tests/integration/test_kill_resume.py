"""``kill -9`` at random moments of runs that save every step: nothing lost, the same bits.

The runs are real processes, started by a server that has the imports done, so that most of a
run's time is steps and saves and a random kill falls into them.
"""

import json
import multiprocessing
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from headrace.store.checkpoint import find_problem, latest_checkpoint
from headrace.trainer import train
from headrace.trainer.metrics import read_rows
from headrace.trainer.resume import read_progress


@pytest.fixture(scope="module")
def processes():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["headrace.trainer.run", "transformers.models.auto"])
    warm = context.Process(target=time.sleep, args=(0,))
    warm.start()
    warm.join()  # the server's imports are done, and no run's duration holds them
    return context


def run_killed(processes, config, seconds):
    """Start the run, kill it after ``seconds`` or let it end; returns whether it ended."""
    process = processes.Process(target=train, args=(config,))
    process.start()
    process.join(seconds)
    ended = process.exitcode is not None
    if ended:
        assert process.exitcode == 0
    else:
        process.kill()
        process.join()
    process.close()
    return ended


def check(processes, make_config, tmp_path, *, num_steps, num_kills, seed):
    config = make_config(
        max_steps=num_steps, save_strategy="steps", save_steps=1, save_total_limit=2,
        logging_steps=3, warmup_steps=5, overwrite_output_dir=False,
        resume_from_checkpoint="auto",
    )  # fmt: skip
    whole = config | {"output_dir": str(tmp_path / "whole")}
    started = time.monotonic()
    assert run_killed(processes, whole, 300)
    duration = time.monotonic() - started
    rng = random.Random(seed)
    out = tmp_path / "run"
    kills, in_save, last = 0, 0, -1
    while kills < num_kills:
        if run_killed(processes, config, rng.uniform(0.05, 0.6) * duration):
            # It ended before the kill: begin again, so that every kill meets a run under way.
            compare(out, tmp_path / "whole", num_steps)
            shutil.rmtree(out)
            last = -1
            continue
        kills += 1
        in_save += any(out.glob(".checkpoint-*"))
        newest = latest_checkpoint(out) if out.exists() else None
        step = -1 if newest is None else read_progress(newest, dtype="bfloat16").step
        assert step >= last  # never further back than what had been saved
        last = step
    assert run_killed(processes, config, 300)
    compare(out, tmp_path / "whole", num_steps)
    return in_save


def compare(out, whole, num_steps):
    for folder in (out, whole):
        assert find_problem(folder / f"checkpoint-{num_steps}") is None
    for name in ("model.safetensors", "optimizer.safetensors"):
        a, b = (load_file(folder / f"checkpoint-{num_steps}" / name) for folder in (out, whole))
        assert a.keys() == b.keys()
        for key in a:
            assert torch.equal(a[key].view(torch.uint8), b[key].view(torch.uint8)), key
    losses = [
        [(row["step"], row["loss"], row["num_tokens"]) for row in read_rows(f / "metrics.jsonl")]
        for f in (out, whole)
    ]
    assert losses[0] == losses[1]
    assert json.loads((out / "run.json").read_text())["status"] == "finished"


def test_a_killed_run_ends_with_the_same_bits(processes, make_config, tmp_path):
    check(processes, make_config, tmp_path, num_steps=15, num_kills=4, seed=0)


@pytest.mark.slow
def test_kills_while_saving_exporting_and_converting():
    """A few of the kills that ``benchmarks/kills.py`` makes by the hundred."""
    script = Path(__file__).parents[2] / "benchmarks" / "kills.py"
    done = subprocess.run(
        [sys.executable, script, "--kills", "12", "--json"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout)["kills"] == 12


@pytest.mark.slow
def test_fifty_random_kills_lose_nothing(processes, make_config, tmp_path):
    in_save = check(processes, make_config, tmp_path, num_steps=40, num_kills=50, seed=1)
    print(f"50 kills, {in_save} of them while a checkpoint was being written")
    assert in_save > 0
