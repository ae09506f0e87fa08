"""A build over Slurm, with stand-ins for its commands that run tasks at once."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("datatrove")

from headrace.corpus.build import build_corpus
from headrace.corpus.config import config_from

SBATCH = """#!/bin/bash
script="${@: -1}"
last=$(sed -n 's/^#SBATCH --array=0-\\([0-9]*\\).*/\\1/p' "$script")
for task in $(seq 0 "${last:-0}"); do
  export SLURM_NODELIST=localhost SLURM_JOB_ID=7 SLURM_ARRAY_TASK_ID=$task RUN_OFFSET=0
  bash "$script" >> "$0.log" 2>&1
done
echo "$script" >> "$0.jobs"
echo "Submitted batch job 7"
"""
SRUN = """#!/bin/bash
while [ "$1" != launch_pickled_pipeline ]; do shift; done
exec "$@"
"""


def tree(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.slow
def test_slurm_tasks_make_the_bytes_of_one_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = tmp_path / "bin"
    commands.mkdir()
    stand_ins = {
        "sbatch": SBATCH,
        "srun": SRUN,
        "squeue": "#!/bin/bash\n",
        "scontrol": "#!/bin/bash\necho localhost\n",
    }
    for name, text in stand_ins.items():
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    path = os.pathsep.join([str(commands), str(Path(sys.executable).parent), os.environ["PATH"]])
    monkeypatch.setenv("PATH", path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setattr("headrace.corpus.sources.units.UNIT_BYTES", 3_000)
    source = tmp_path / "in.jsonl"
    with source.open("w") as file:
        for number in range(100):
            text = f"Note {number * 7919} of the mill, the wheel and the price of {number} loaves."
            row = {"id": number, "text": text, "date": f"{2010 + number % 9}-03-01"}
            file.write(json.dumps(row) + "\n")
    values = {
        "cutoff": "2016-12-31",
        "num_workers": 1,
        "sources": [{"name": "s", "type": "jsonl", "path": str(source), "available_at": "date"}],
    }
    plain = build_corpus(config_from({**values, "output_dir": str(tmp_path / "plain")}))
    executor = {
        "type": "slurm",
        "tasks": 2,
        "options": {"time": "01:00:00", "partition": "cpu", "mail_user": None},
    }
    spread = build_corpus(
        config_from({**values, "output_dir": str(tmp_path / "spread"), "executor": executor})
    )
    assert tree(spread.path) == tree(plain.path)
    # Units and shards, each with datatrove's own job that merges statistics.
    assert len((commands / "sbatch.jobs").read_text().splitlines()) >= 2
