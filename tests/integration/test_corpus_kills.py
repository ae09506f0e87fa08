"""A build that is killed at any moment and run again gives the bytes of an undisturbed one."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headrace.corpus.manifest import Manifest
from headrace.errors import ConfigError

NUM_KILLS = 30
WORDS = ["river", "mill", "wheel", "stone", "ledger", "price", "wheat", "rye", "frost", "gauge"]

# Builds one corpus in a loop of its own process; small units, so that many things are half done.
SCRIPT = """
import sys
from headrace.corpus.sources import units
units.UNIT_BYTES = 12_000
from headrace.corpus.build import build_corpus
from headrace.corpus.config import load_config
if __name__ == "__main__":
    print("started", flush=True)
    build_corpus(load_config(sys.argv[1], sys.argv[2:]))
"""


def tree(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    rng = random.Random(0)
    source = tmp_path / "in.jsonl"
    with source.open("w") as file:
        for number in range(600):
            text = " ".join(rng.choice(WORDS) for _ in range(40)) + f" note {number % 560}."
            row = {"id": number, "text": text, "date": f"{2010 + number % 9}-03-01"}
            file.write(json.dumps(row) + "\n")
        file.write('{"half a line')
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "cutoffs: {a: 2013-12-31, b: 2016-12-31}\n"
        "tokenizer: {train: bpe, vocab_size: 300}\n"
        "shard_bytes: 40kB\n"
        "output_dir: unset\n"
        f"sources: [{{name: s, type: jsonl, path: {source}, available_at: date}}]\n"
    )
    return path


def start(script: Path, recipe: Path, output: Path, num_workers: int = 1) -> subprocess.Popen[str]:
    words = [f"output_dir={output}", f"num_workers={num_workers}"]
    return subprocess.Popen(
        [sys.executable, str(script), str(recipe), *words],
        stdout=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "CORPUS_KILLS": str(script),
        },
    )


def running(script: Path) -> list[int]:
    """Processes of a killed build that are still there (its own, its fork server, workers)."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"CORPUS_KILLS={script}".encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


@pytest.mark.slow
def test_thirty_kills_give_identical_bytes(tmp_path: Path, recipe: Path) -> None:
    script = tmp_path / "build_once.py"
    script.write_text(SCRIPT)
    plain = tmp_path / "plain"
    process = start(script, recipe, plain)
    assert process.stdout is not None
    process.stdout.readline()
    begun = time.perf_counter()
    assert process.wait() == 0
    process.stdout.close()
    duration = time.perf_counter() - begun
    expected = tree(plain)

    killed, output, kills = random.Random(1), tmp_path / "killed", 0
    while kills < NUM_KILLS:
        process = start(script, recipe, output, num_workers=1 + 2 * (kills % 2))
        assert process.stdout is not None
        process.stdout.readline()
        try:
            code = process.wait(timeout=killed.uniform(0, duration))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills += 1
            patience = time.perf_counter() + 40  # a fork server looks up after its imports
            while running(script) and time.perf_counter() < patience:
                time.sleep(0.02)
            assert running(script) == []  # no worker outlives its build
        else:
            assert code == 0
        process.stdout.close()
        # Whatever the moment: no corpus, or all of one.
        try:
            Manifest.load(output)
        except ConfigError:
            assert not output.exists()
        else:
            assert tree(output) == expected
            # Start from nothing again, or the other kills would meet finished pieces only.
            for name in (output, tmp_path / "killed.work"):
                subprocess.run(["rm", "-rf", str(name)], check=True)
    process = start(script, recipe, output, num_workers=2)
    assert process.wait() == 0
    assert process.stdout is not None
    process.stdout.close()
    assert tree(output) == expected
    leftovers = [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]
    assert leftovers == []
