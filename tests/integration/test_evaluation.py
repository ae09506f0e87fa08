"""What an evaluation reports: by set, by month, on documents that are not trained on."""

import json
import math

import pytest

from headrace.data.loader import RowSet
from headrace.errors import ConfigError
from headrace.trainer.metrics import read_rows


@pytest.fixture
def dated(tmp_path, sentences):
    path = tmp_path / "dated.jsonl"
    rows = [
        {"text": " ".join(sentences[: 1 + n % 5]), "day": f"2016-{1 + n % 3:02d}-15"}
        for n in range(12)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path, rows


def evaluated(result):
    rows = read_rows(result.output_dir / "metrics.jsonl")
    return [row for row in rows if "eval_loss" in row]


def test_months_are_exact(run_config, dated, tmp_path):
    """Each month equals a set that holds the documents of that month alone."""
    path, rows = dated
    months = sorted({row["day"][:7] for row in rows})
    alone = []
    for month in months:
        file = tmp_path / f"{month}.jsonl"
        chosen = [row for row in rows if row["day"].startswith(month)]
        file.write_text("".join(json.dumps(row) + "\n" for row in chosen))
        alone.append({"path": str(file), "name": month})
    sets = [{"path": str(path), "date_field": "day", "name": "dated"}, *alone]
    result = run_config(eval_datasets=sets, eval_steps=4, max_steps=4)
    (row,) = evaluated(result)
    by_month = row["eval_loss_by_month"]
    assert sorted(by_month) == months
    for month in months:
        assert by_month[month] == pytest.approx(row[f"eval_{month}_loss"], rel=1e-6)
        expected = math.exp(by_month[month])
        assert row["eval_perplexity_by_month"][month] == pytest.approx(expected)
    assert row["eval_perplexity"] == pytest.approx(math.exp(row["eval_loss"]))
    low, high = min(by_month.values()), max(by_month.values())
    assert low < row["eval_dated_loss"] < high


def test_held_out_documents_are_never_in_a_training_row(run_config, monkeypatch):
    seen = {True: set(), False: set()}
    supervise = RowSet.supervise

    def spy(self, piece):
        start = int(self.plan.starts[piece])
        document = int(self.store.offsets.searchsorted(start, side="right")) - 1
        seen["held out" in self.label].add(document)
        return supervise(self, piece)

    monkeypatch.setattr(RowSet, "supervise", spy)
    run_config(val_set_size=0.25, num_train_epochs=1, max_steps=-1)
    assert len(seen[True]) == 6
    assert seen[True] | seen[False] == set(range(24))
    assert not seen[True] & seen[False]
    with pytest.raises(ConfigError, match=r"what differs: val_set_size"):
        run_config(
            val_set_size=0.5, num_train_epochs=1, max_steps=-1, resume_from_checkpoint="auto"
        )


def test_a_run_stops_early_when_nothing_improves(run_config):
    result = run_config(
        val_set_size=4, eval_steps=1, early_stopping_patience=2, learning_rate=1e-30, max_steps=9,
        lr_scheduler_type="constant", warmup_steps=0,
    )  # fmt: skip
    assert (result.status, result.step) == ("stopped", 3)
    with pytest.raises(ConfigError, match="no effect without an evaluation"):
        run_config(early_stopping_patience=2)


def test_the_watchdog_ends_a_run_whose_loss_stays_high(run_config):
    result = run_config(loss_watchdog_threshold=1.0, loss_watchdog_patience=3)
    assert (result.status, result.step) == ("stopped", 3)
    calm = run_config(loss_watchdog_threshold=99.0, overwrite_output_dir=True)
    assert calm.status == "finished"


def test_utilisation_is_a_share_of_a_peak_that_is_named(run_config):
    result = run_config(max_steps=2)
    row = read_rows(result.output_dir / "metrics.jsonl")[-1]
    record = json.loads((result.output_dir / "run.json").read_text())
    peak = record["peak_flops_per_second"]["mfu"]
    assert row["mfu"] == pytest.approx(row["model_tflops"] * 1e12 / peak)
    assert 0 < row["mfu"] < 1
