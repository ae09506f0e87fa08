"""From nothing to the first step: a model's safetensors on local disk, a fresh process, no cache.

Invariant: the file is out of the page cache before it is read alone, and again before the start;
the compiler's cache is a new folder. What is reported beside the whole is that minus the plain
read, and a second start with the compiler's cache warm.

``python -m benchmarks.cases.start FOLDER TOKENS SEQUENCE`` is the process that is timed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.cases.common import (
    LEARNING_RATE,
    MAX_GRAD_NORM,
    SEQUENCE,
    default_device,
    micro_batches,
    qwen3_config,
    report,
    step_tokens,
)

BLOCK = 16 << 20
UNITS_A_FILE = 10


def start_case(
    *,
    model: str = "8b",
    tokens: int = 32768,
    sequence: int = SEQUENCE,
    folder: str | None = None,
) -> dict[str, Any]:
    """Seconds of a start, cold and with the compiler's cache warm.

    Args:
        model: a name in :data:`benchmarks.cases.common.SHAPES`.
        tokens: of the first step.
        sequence: tokens of a sequence.
        folder: on the disk to measure; by default where temporary files go, or where they go to
            memory, the working directory.
    """
    folder = folder or tempfile.gettempdir()
    if file_system(folder) in ("tmpfs", "ramfs"):
        folder = str(Path.cwd())
    with tempfile.TemporaryDirectory(dir=folder, prefix="headrace-start-") as name:
        weights = Path(name) / "model"
        num_bytes = write_model(model, weights)
        drop_from_cache(weights)
        read_seconds = read_all(weights)
        result: dict[str, Any] = {
            "model": model,
            "file_system": file_system(folder),
            "file_gib": num_bytes / 2**30,
            "read_seconds": read_seconds,
            "read_gbps": num_bytes / read_seconds / 1e9,
        }
        cache = Path(name) / "compiled"
        for kind in ("cold", "warm"):
            drop_from_cache(weights)
            stages = _start(weights, tokens, sequence, cache)
            total = stages["total"]
            result |= {f"{kind}_start_seconds": total, f"{kind}_stages": stages}
            result[f"{kind}_beyond_reading_seconds"] = total - read_seconds
            result["beyond_reading_seconds"] = result["cold_beyond_reading_seconds"]
            report(result)
    return result


def write_model(model: str, folder: Path) -> int:
    """A Hugging Face folder of random bf16 weights; one layer is drawn, the others repeat it."""
    import torch
    from safetensors.torch import save_file

    from headrace.models.spec import ModelSpec

    config = qwen3_config(model)
    config.architectures = ["Qwen3ForCausalLM"]
    spec = ModelSpec(config)
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    drawn: dict[str, torch.Tensor] = {}

    def values(local_name: str, shape: tuple[int, ...]) -> torch.Tensor:
        key = f"{local_name}{shape}"
        if key not in drawn:
            full = torch.ones if len(shape) < 2 else torch.randn
            drawn[key] = (full(shape) * (0.02 if len(shape) >= 2 else 1.0)).bfloat16()
        return drawn[key].clone()

    index: dict[str, str] = {}
    starts = range(0, len(spec.units), UNITS_A_FILE)
    for number, start in enumerate(starts, 1):
        file = f"model-{number:05d}-of-{len(starts):05d}.safetensors"
        tensors = {
            param.name: values(param.local_name, param.shape)
            for unit in spec.units[start : start + UNITS_A_FILE]
            for param in unit.params
        }
        save_file(tensors, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, file)
    total = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": index})
    )
    return total


def file_system(folder: str) -> str:
    """Type of the mount that holds ``folder``."""
    there = Path(folder).resolve()
    found, kind = Path("/"), "unknown"
    for line in Path("/proc/mounts").read_text().splitlines():
        mount, name = line.split()[1:3]
        if there.is_relative_to(mount) and Path(mount).is_relative_to(found):
            found, kind = Path(mount), name
    return kind


def drop_from_cache(folder: Path) -> None:
    """Write the files out and let their pages go, so that the next read comes from the disk."""
    for file in folder.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def read_all(folder: Path) -> float:
    """Seconds to read every file once, in order."""
    buffer = bytearray(BLOCK)
    begun = time.perf_counter()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - begun


def _start(weights: Path, tokens: int, sequence: int, cache: Path) -> dict[str, float]:
    """Start a process and wait for its first step; seconds by stage, since it was started."""
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "TRITON_CACHE_DIR": str(cache / "triton"),
    }
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.cases.start", str(weights), str(tokens),
         str(sequence)],
        stdout=subprocess.PIPE, env=environment, text=True, check=True,
    )  # fmt: skip
    reached: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    stages, before = {}, begun
    for name, moment in reached.items():
        stages[name] = moment - before
        before = moment
    return {**stages, "total": before - begun}


def _timed_process(folder: Path, tokens: int, sequence: int) -> None:
    """Everything that a run does before its first step returns."""
    reached: dict[str, float] = {}

    def reach(stage: str) -> None:
        reached[stage] = time.monotonic()  # one clock for all processes of the machine

    import torch

    from benchmarks.cases.engine import place
    from headrace.engine import Engine
    from headrace.models.spec import ModelSpec
    from headrace.policy.search import typical_rates
    from headrace.store.loading import load_pretrained
    from headrace.store.state import ModelState

    reach("imports")
    device = default_device()
    spec = ModelSpec.from_pretrained(str(folder))
    room, rates = None, None
    if device.type == "cuda":
        room = torch.cuda.mem_get_info(device)[0]
        rates = typical_rates(device, len(os.sched_getaffinity(0)))
    config, rows, _ = place(spec, tokens, {}, None, room=room, rates=rates, sequence=sequence)
    reach("placement")
    state = ModelState.allocate(
        spec, "bfloat16", device=device, device_units=config.device_units or 0
    )
    reach("allocation")
    load_pretrained(spec, state, folder)
    reach("weights")
    batches = micro_batches(*step_tokens(spec.vocab_size, tokens, 0, sequence), rows)
    with Engine(spec, state, device, config) as engine:
        reach("engine")
        engine.step(batches, learning_rate=LEARNING_RATE, max_grad_norm=MAX_GRAD_NORM)
        reach("first_step")
    print(json.dumps(reached), flush=True)


if __name__ == "__main__":
    _timed_process(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
