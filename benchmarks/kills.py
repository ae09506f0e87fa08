"""``kill -9`` at random moments of training with saves, of exporting and of converting.

Real processes, started by a server that has the imports done, so that most of their time is the
work itself. After every kill: the last complete checkpoint is never older than the one before it,
and a folder under the name asked for is whole or absent. At the end of each part the work is done
once more without a kill, and its result is compared bit by bit with that of an undisturbed process.

Usage: python benchmarks/kills.py [--kills 200] [--seed 0] [--json]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import shutil
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_STEPS = 30
MODEL = {
    "model_type": "qwen3",
    "vocab_size": 2048,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


def train(config: dict[str, Any]) -> None:
    from headrace.trainer import train as run

    run(config)


def export(source: Path, out: Path) -> None:
    from headrace.trainer.export import export_checkpoint

    export_checkpoint(source, out)


def convert_model(source: Path, out: Path) -> None:
    from headrace.trainer.convert import convert_to_model

    convert_to_model(source, out)


def convert_checkpoint(source: Path, out: Path) -> None:
    from headrace.trainer.convert_state import convert_to_checkpoint

    convert_to_checkpoint(source, out)


class Killer:
    """Starts processes and kills them after a random part of the time they need."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)  # noqa: S311 - moments, not secrets
        self.context: Any = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(
            ["headrace.trainer.run", "headrace.trainer.convert_state", "transformers.models.auto"]
        )
        warm = self.context.Process(target=time.sleep, args=(0,))
        warm.start()
        warm.join()

    def run(self, work: Callable[..., None], *arguments: Any, seconds: float | None = None) -> bool:
        """Whether it ended by itself, within ``seconds`` if given."""
        process = self.context.Process(target=work, args=arguments)
        process.start()
        process.join(seconds)
        ended = process.exitcode is not None
        if not ended:
            process.kill()
            process.join()
        elif process.exitcode != 0:
            raise SystemExit(f"{work.__name__} failed by itself: {process.exitcode}")
        process.close()
        return ended

    def timed(self, work: Callable[..., None], *arguments: Any) -> float:
        """Seconds that an undisturbed process takes."""
        started = time.monotonic()
        self.run(work, *arguments)
        return time.monotonic() - started


def same_files(a: Path, b: Path) -> None:
    """Two folders hold the same bytes of weights and planes."""
    names = sorted(path.name for path in a.glob("*.safetensors"))
    assert names, a
    assert names == sorted(path.name for path in b.glob("*.safetensors")), (a, b)
    for name in names:
        assert (a / name).read_bytes() == (b / name).read_bytes(), (a, b, name)


def kill_training(killer: Killer, folder: Path, num_kills: int) -> dict[str, Any]:
    """Runs that save every step, killed and resumed until they end."""
    from headrace.store.checkpoint import latest_checkpoint

    config = make_config(folder)
    duration = killer.timed(train, config | {"output_dir": str(folder / "whole")})
    out = folder / "run"
    kills = in_save = ended = 0
    last = -1
    while kills < num_kills:
        if killer.run(train, config, seconds=killer.rng.uniform(0.03, 0.7) * duration):
            ended += 1
            same_files(
                out / f"checkpoint-{NUM_STEPS}", folder / "whole" / f"checkpoint-{NUM_STEPS}"
            )
            shutil.rmtree(out)
            last = -1
            continue
        kills += 1
        in_save += any(out.glob(".checkpoint-*"))
        newest = latest_checkpoint(out) if out.exists() else None
        step = -1 if newest is None else int(newest.name.rpartition("-")[2])
        assert step >= last, f"step {last} was lost: {step}"
        last = step
    killer.run(train, config)
    same_files(out / f"checkpoint-{NUM_STEPS}", folder / "whole" / f"checkpoint-{NUM_STEPS}")
    return {"kills": kills, "while_writing": in_save, "runs_compared": ended + 1}


def kill_copying(
    killer: Killer, work: Callable[..., None], source: Path, out: Path, num_kills: int
) -> dict[str, Any]:
    """A folder is asked for again and again; under its name it is whole or absent."""
    whole = out.with_name(f"{out.name}-whole")
    duration = killer.timed(work, source, whole)
    kills = in_write = compared = 0
    while kills < num_kills:
        ended = killer.run(work, source, out, seconds=killer.rng.uniform(0.0, 1.0) * duration)
        kills += not ended
        # Other work on the machine comes and goes: kills must reach the end of the work, too.
        duration *= 0.8 if ended else 1.05
        in_write += not ended and any(out.parent.rglob("*.writing"))
        found = final(out)
        assert ended is False or found is not None
        if found is not None:
            same_files(found, final(whole) or whole)
            compared += 1
            shutil.rmtree(out)
    shutil.rmtree(out, ignore_errors=True)
    killer.run(work, source, out)
    same_files(final(out) or out, final(whole) or whole)
    return {"kills": kills, "while_writing": in_write, "folders_compared": compared + 1}


def final(out: Path) -> Path | None:
    """The folder that was asked for: itself, or the checkpoint in it."""
    if (out / "model.safetensors").is_file():
        return out
    return next(iter(sorted(out.glob("checkpoint-*"))), None) if out.is_dir() else None


def make_config(folder: Path) -> dict[str, Any]:
    """A configuration of small steps that saves every one of them."""
    return {
        "model_config": MODEL,
        "datasets": [{"path": str(folder / "tokens.jsonl"), "type": "tokens"}],
        "data_cache_dir": str(folder / "cache"),
        "output_dir": str(folder / "run"),
        "max_length": 64,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-3,
        "max_steps": NUM_STEPS,
        "save_steps": 1,
        "save_total_limit": 2,
        "resume_from_checkpoint": "auto",
        "device": "cpu",
        "progress": "none",
    }


def make_shards(checkpoint: Path, folder: Path) -> None:
    """The checkpoint as FSDP2 and axolotl leave theirs."""
    import torch
    from safetensors.torch import load_file
    from torch.distributed import checkpoint as dcp

    weights = {n: t.float() for n, t in load_file(checkpoint / "model.safetensors").items()}
    state: dict[str, dict[str, Any]] = {}
    for name, tensor in load_file(checkpoint / "optimizer.safetensors").items():
        parameter, _, kind = name.rpartition(".")
        if kind != "remainder":
            state.setdefault(parameter, {"step": torch.tensor(2.0)})[kind] = tensor
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that there is one process
        dcp.save({"model": weights}, checkpoint_id=folder / "pytorch_model_fsdp_0", no_dist=True)
        moments = {"optimizer": {"state": state}}
        dcp.save(moments, checkpoint_id=folder / "optimizer_0", no_dist=True)
    shutil.copy(checkpoint / "config.json", folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200, help="of all parts together")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    started = time.monotonic()
    killer = Killer(options.seed)
    quarter = options.kills // 4
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rng = random.Random(0)  # noqa: S311 - tokens, not secrets
        rows = [[rng.randrange(2048) for _ in range(64)] for _ in range(32)]
        text = "".join(json.dumps({"input_ids": row}) + "\n" for row in rows)
        (folder / "tokens.jsonl").write_text(text)
        results["saving"] = kill_training(killer, folder, options.kills - 3 * quarter)
        checkpoint = folder / "whole" / f"checkpoint-{NUM_STEPS}"
        shards = folder / "shards" / "checkpoint-2"
        make_shards(checkpoint, shards)
        for part, work, source in (
            ("exporting", export, checkpoint),
            ("converting to a model", convert_model, shards),
            ("converting to a checkpoint", convert_checkpoint, shards),
        ):
            place = folder / work.__name__
            place.mkdir()
            results[part] = kill_copying(killer, work, source, place / "out", quarter)
    seconds = time.monotonic() - started
    total = sum(part["kills"] for part in results.values())
    if options.json:
        print(json.dumps({"kills": total, "seconds": seconds, "parts": results}))
        return
    for part, figures in results.items():
        print(f"{part:28}" + ", ".join(f"{v} {k.replace('_', ' ')}" for k, v in figures.items()))
    print(f"{total} kills in {seconds:.0f} s: nothing lost, every result bitwise equal")


if __name__ == "__main__":
    sys.exit(main())
