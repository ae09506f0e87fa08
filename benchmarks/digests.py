"""What the digests of a checkpoint cost: a save, a load and an export with them and without.

A Llama-shaped model with random weights and moments is saved, loaded and exported in turns, as it
is and with digests that are never computed. ``hash`` is the rate of the digest itself over the same
bytes, one thread. Files go to a temporary folder: name one on the disk that matters with
``--folder``; in memory (``/dev/shm``) the share is the largest that it can be.

Usage: python benchmarks/digests.py [--layers 12] [--rounds 5] [--folder /dev/shm] [--json]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MODEL = {
    "model_type": "llama",
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "intermediate_size": 1536,
    "vocab_size": 32000,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}


class Idle:
    """Stands where a hasher stands, and does nothing."""

    def update(self, _data: memoryview) -> None:
        """Nothing."""

    def hexdigest(self) -> str:
        """Nothing."""
        return ""


@contextlib.contextmanager
def without_digests() -> Iterator[None]:
    """Save and read as if there were none."""
    with (
        mock.patch("headrace.store.safetensors_io.Hasher", Idle),
        mock.patch("headrace.store.safetensors_io.digest", return_value=""),
        mock.patch("headrace.store.digests.Hasher", Idle),
        mock.patch("headrace.store.digests.Digests.check", return_value=None),
        mock.patch("headrace.store.digests.Digests.find_problem", return_value=None),
    ):
        yield


def timed(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def measure(folder: Path, layers: int, rounds: int) -> dict[str, Any]:
    import torch
    import xxhash
    from transformers import AutoConfig

    from headrace.models.spec import ModelSpec
    from headrace.store.checkpoint import load_checkpoint, save_checkpoint
    from headrace.store.loading import initialise
    from headrace.store.state import ModelState
    from headrace.trainer.export import export_checkpoint

    config = AutoConfig.for_model(**MODEL, num_hidden_layers=layers)
    spec = ModelSpec(config)
    state = ModelState(spec.units, "bfloat16")
    initialise(spec, state, seed=0)
    for unit in state.units:
        unit.exp_avg.normal_()
        unit.exp_avg_sq.uniform_()
    path = folder / "checkpoint-1"

    def save() -> None:
        save_checkpoint(folder, spec, state, step=1, trainer_state={})

    def export() -> None:
        shutil.rmtree(folder / "model", ignore_errors=True)
        export_checkpoint(path, folder / "model")

    works = {"save": save, "load": lambda: load_checkpoint(path, spec, state), "export": export}
    found: dict[str, dict[str, list[float]]] = {name: {"with": [], "without": []} for name in works}
    save()
    for _ in range(rounds):
        for name, work in works.items():
            with without_digests():
                found[name]["without"].append(timed(work))
            found[name]["with"].append(timed(work))
    data = torch.cat([unit.exp_avg for unit in state.units]).numpy().data.cast("B")
    rate = statistics.median(
        len(data) / timed(lambda: xxhash.xxh3_128(data).digest()) for _ in range(rounds)
    )
    figures: dict[str, Any] = {
        "state_bytes": state.state_bytes,
        "hash_bytes_per_second": rate,
    }
    state.close()
    for name, times in found.items():
        with_, without = (statistics.median(times[kind]) for kind in ("with", "without"))
        figures[name] = {"seconds": with_, "without": without, "slower": with_ / without - 1}
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12, help="of the model")
    parser.add_argument("--rounds", type=int, default=5, help="of each kind, in turns")
    parser.add_argument("--folder", type=Path, help="where files are written")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        figures = measure(Path(name), options.layers, options.rounds)
    if options.json:
        print(json.dumps(figures))
        return
    print(
        f"state {figures['state_bytes'] / 2**20:,.0f} MiB, "
        f"hash {figures['hash_bytes_per_second'] / 1e9:.1f} GB/s"
    )
    for name in ("save", "load", "export"):
        f = figures[name]
        print(
            f"{name:7} {f['seconds']:6.3f} s with digests, {f['without']:6.3f} s without: "
            f"{f['slower']:+.1%}"
        )


if __name__ == "__main__":
    main()
