"""SIGKILL at every operation of a save (pitfall 16), and the memory a save takes (pitfall 15).

Both run in a process of their own: the first forks a child an operation, which must not happen
in a process with threads; the second measures its peak.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
ENVIRONMENT = os.environ | {
    "PYTHONPATH": os.pathsep.join([str(TESTS.parent / "src"), str(TESTS / "helpers")]),
    "OMP_NUM_THREADS": "1",
}


def run_script(script, *arguments, timeout=100):
    completed = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr[-3000:]
    return json.loads(completed.stdout.splitlines()[-1])


KILL = """
import json, os, shutil, signal, sys
from pathlib import Path

import torch
from disk_operations import announce_operations
from headrace.store.checkpoint import (
    export_pretrained, latest_checkpoint, load_checkpoint, save_checkpoint,
)
from headrace.store.loading import load_pretrained
from headrace.store.state import ModelState
from tiny import differing, planes, tiny_config, tiny_state

folder = Path(sys.argv[1])
template = folder.with_name("template")
config = tiny_config("llama", tied=True, num_hidden_layers=1)
spec, state = tiny_state(config, "bfloat16")


def filled(seed):  # every number follows from the seed
    state = ModelState(spec.units, "bfloat16")
    for number, unit in enumerate(state.units):
        for param in unit.layout.params:
            value = torch.arange(param.numel, dtype=torch.float32).view(param.shape) * 0.001
            unit.set_master(param, value + seed)
            unit.exp_avg[param.slice] = number + seed
            unit.exp_avg_sq[param.slice] = number + seed + 0.5
    state.optimizer_step = seed
    return state


def save(folder, step, seed):
    save_checkpoint(folder, spec, filled(seed), step=step, trainer_state={"seed": seed})


def work():
    if scenario == "next":
        save(folder, 2, 2)
    elif scenario == "replace":
        save(folder, 1, 2)
    else:
        export_pretrained(spec, filled(2), folder / "model")


def killed_at(victim):
    seen = 0

    def announce(name):
        nonlocal seen
        seen += 1
        if seen == victim:
            os.kill(os.getpid(), signal.SIGKILL)

    announce_operations(announce)
    work()


def check(is_done):  # exactly one of the two states, whole; the next save works and clears up
    path = latest_checkpoint(folder)
    seed = load_checkpoint(path, spec, state)["seed"]
    assert differing(planes(state), expected[seed]) == []
    new = {"next": "checkpoint-2", "replace": "checkpoint-1", "export": None}[scenario]
    assert (path.name, seed) in {("checkpoint-1", 1), (new, 2)}
    assert not is_done or scenario == "export" or seed == 2
    if scenario == "export":
        if (folder / "model").exists():
            load_pretrained(spec, state, folder / "model")
            hi = {name: bits for name, bits in planes(state).items() if "weights" in name}
            assert differing(hi, {name: expected[2][name] for name in hi}) == []
            shutil.rmtree(folder / "model")
        export_pretrained(spec, state, folder / "model")
    else:
        save(folder, 3, 3)
    left = {entry.name for entry in folder.iterdir()}
    allowed = {"checkpoint-1", "model" if scenario == "export" else "checkpoint-3"}
    assert allowed <= left <= allowed | {new}, left


os.fsync = lambda descriptor: None  # a killed process loses nothing that it wrote: only slow
expected = {seed: planes(filled(seed)) for seed in (1, 2)}
save(template, 1, 1)
kills = {}
for scenario in ("next", "replace", "export"):
    # Up to the renames, replacing a checkpoint is writing the next one.
    victim, status = kills["next"] - 12 if scenario == "replace" else 0, None
    while status != 0:
        victim += 1
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(template, folder)
        pid = os.fork()
        if pid == 0:
            try:
                killed_at(victim)
            finally:
                os._exit(0 if sys.exc_info()[0] is None else 1)
        status = os.waitpid(pid, 0)[1]
        assert status in (0, signal.SIGKILL), (scenario, victim, status)
        check(status == 0)
    kills[scenario] = victim - 1
print(json.dumps(kills))
"""


def test_kill_at_every_write_of_a_save(tmp_path):
    """Pitfall 16. Before and within every write, flush and rename: the last complete one loads.

    Of the next checkpoint, of one that replaces another, of an export.
    """
    kills = run_script(KILL, tmp_path / "run")
    assert kills["replace"] > kills["next"] > 100
    assert kills["export"] > 30


MEMORY = """
import json, sys, threading
from pathlib import Path

from headrace.store.checkpoint import export_pretrained, load_checkpoint, save_checkpoint
from headrace.store.loading import load_pretrained
from tiny import tiny_config, tiny_state

config = tiny_config(
    "llama", tied=True, hidden_size=512, intermediate_size=1408, num_hidden_layers=7,
    vocab_size=4096, num_attention_heads=8,
)


def status(field):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024


def peak(work):
    # The kernel's own high-water mark, set back to what is resident now.
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    work()
    return status("VmHWM") - before


def anonymous_peak(work):
    # Reading maps the files, and their pages count as resident although they are page cache.
    samples, done = [status("RssAnon")], threading.Event()

    def sample():
        while not done.wait(0.0005):
            samples.append(status("RssAnon"))

    thread = threading.Thread(target=sample)
    thread.start()
    work()
    done.set()
    thread.join()
    assert len(samples) > 20
    return max(samples) - samples[0]


folder = Path(sys.argv[1])
result = {}
for dtype in ("float32", "bfloat16"):
    spec, state = tiny_state(config, dtype)
    for unit in state.units:
        unit.exp_avg.fill_(1.0)
        unit.exp_avg_sq.fill_(2.0)
    run = folder / dtype

    def save(step=1):
        save_checkpoint(run, spec, state, step=step, trainer_state={})

    save(0)  # what is imported at the first use is not the model's
    sizes = [4 * unit.num_parameters for unit in spec.units]
    result[dtype] = {
        "state": state.state_bytes,
        "largest_unit": max(sizes),
        "weights": sum(sizes),
        "save": peak(save),
        "export": peak(lambda: export_pretrained(spec, state, run / "model")),
        "resume": anonymous_peak(lambda: load_checkpoint(run / "checkpoint-1", spec, state)),
        "load": anonymous_peak(lambda: load_pretrained(spec, state, run / "model")),
    }
    state.close()
print(json.dumps(result))
"""


def test_save_doubles_host_memory(tmp_path):
    """Pitfall 15. 87 MB of weights, 262 of state: saving and loading peak within one unit more."""
    for found in run_script(MEMORY, tmp_path).values():
        assert found["weights"] > 80e6
        assert found["state"] == 3 * found["weights"]
        for part in ("save", "export", "resume", "load"):
            assert found[part] < found["largest_unit"] + 4e6, found
