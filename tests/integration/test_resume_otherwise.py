"""Going on with other settings of the engine: the same data, the same result to rounding."""

import shutil

import pytest

from headrace.store.checkpoint import read_record
from headrace.trainer.metrics import read_rows


@pytest.mark.parametrize(
    "engine",
    [{"micro_batches_per_wave": 1}, {"activations": "recompute", "weight_slots": 2}],
)
def test_resume_with_other_waves_or_activations(run_config, tmp_path, engine):
    """The same rows in the same order, and the same losses to rounding."""
    whole = run_config(output_dir=str(tmp_path / "whole"))
    run_config(max_steps=8, save_strategy="steps", save_steps=4)
    shutil.rmtree(tmp_path / "run" / "checkpoint-8")
    result = run_config(resume_from_checkpoint="auto", engine=engine)
    rows = [
        {row["step"]: row for row in read_rows(r.output_dir / "metrics.jsonl")}
        for r in (result, whole)
    ]
    for step, row in rows[1].items():
        assert rows[0][step]["num_tokens"] == row["num_tokens"]
        # float32 sums in another order; the loss is some 5 nats.
        assert rows[0][step]["loss"] == pytest.approx(row["loss"], rel=1e-5)
    loaders = [read_record(r.checkpoint)["trainer_state"]["loader"] for r in (result, whole)]
    assert loaders[0] == loaders[1]
