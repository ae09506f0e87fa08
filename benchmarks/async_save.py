"""How much of a run's time its checkpoints take: none, training waits, written beside the steps.

A Llama-shaped model with random weights trains on random tokens, on the CPU, through
``headrace.trainer.train``, in turns: without checkpoints, with ``async_save: false`` and with the
default. Counted is the time from the second step to the last one's end, so that neither the start
nor the last checkpoint (for which every run waits) is in it.

- ``stalled``: the share of the time in which training waited for saves, as ``run.json`` says;
- ``slower``: the whole time against that without checkpoints, which also has what the processor
  spends on writing (on a CPU it is taken from compute; a GPU's host is mostly idle).

Usage: python benchmarks/async_save.py [--steps 15] [--every 4] [--rounds 3] [--json]
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

MODEL = {
    "model_type": "llama",
    "hidden_size": 320,
    "num_hidden_layers": 8,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "intermediate_size": 896,
    "vocab_size": 8192,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
MODES: dict[str, dict[str, Any]] = {
    "none": {"save_strategy": "no"},
    "waiting": {"async_save": False},
    "async": {},
}


class Clock(TrainerCallback):
    """From the second step to the end of the last one."""

    def __init__(self, record: Path) -> None:
        self.times: list[float] = []
        self.record = record

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Note the time."""
        self.times.append(time.perf_counter())

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Note the time, and what earlier saves have cost."""
        self.last = time.perf_counter()
        self.stalled = json.loads(self.record.read_text()).get("save_stall_seconds", 0.0)

    @property
    def seconds(self) -> float:
        """Of all steps but the first."""
        return self.last - self.times[1]


def measure(mode: str, folder: Path, options: argparse.Namespace) -> dict[str, float]:
    from headrace.trainer import train

    out = folder / mode
    shutil.rmtree(out, ignore_errors=True)
    clock = Clock(out / "run.json")
    config = {
        "model_config": MODEL,
        "datasets": [{"path": str(folder / "tokens.jsonl"), "type": "tokens"}],
        "data_cache_dir": str(folder / "cache"),
        "output_dir": str(out),
        "max_length": options.length,
        "per_device_train_batch_size": options.rows,
        "learning_rate": 1e-4,
        "max_steps": options.steps,
        "save_steps": options.every,
        "save_total_limit": 1,
        "device": "cpu",
        "progress": "none",
    }
    result = train(config | MODES[mode], callbacks=[clock])
    return {"seconds": clock.seconds, "stalled": clock.stalled, "state": result.state_bytes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=15, help="optimizer steps of a run")
    parser.add_argument("--every", type=int, default=4, help="steps between checkpoints")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each kind, in turns")
    parser.add_argument("--rows", type=int, default=4, help="rows of the micro-batch")
    parser.add_argument("--length", type=int, default=256, help="tokens of a row")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rng = random.Random(0)  # noqa: S311 - tokens, not secrets
        rows = [[rng.randrange(8192) for _ in range(options.length)] for _ in range(64)]
        text = "".join(json.dumps({"input_ids": row}) + "\n" for row in rows)
        (folder / "tokens.jsonl").write_text(text)
        for _ in range(options.rounds):
            for mode, runs in found.items():
                runs.append(measure(mode, folder, options))
    seconds = {mode: statistics.median(r["seconds"] for r in runs) for mode, runs in found.items()}
    figures: dict[str, Any] = {
        "state_bytes": found["none"][0]["state"],
        "step_seconds": seconds["none"] / (options.steps - 1),
        "steps_between_saves": options.every,
    }
    for mode in ("waiting", "async"):
        stalled = statistics.median(r["stalled"] for r in found[mode])
        figures[mode] = {
            "stalled": stalled / seconds[mode],
            "slower": seconds[mode] / seconds["none"] - 1,
        }
    if options.json:
        print(json.dumps(figures))
        return
    print(
        f"state {figures['state_bytes'] / 2**20:,.0f} MiB, {figures['step_seconds']:.2f} s a step, "
        f"a checkpoint every {options.every} steps"
    )
    for mode in ("waiting", "async"):
        shares = figures[mode]
        print(f"{mode:8} stalled {shares['stalled']:6.2%}  slower {shares['slower']:6.2%}")


if __name__ == "__main__":
    main()
