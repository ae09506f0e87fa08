"""Sums over intervals, and the file they go to."""

import json

import pytest

from headrace.engine import StepResult
from headrace.trainer.metrics import Meter, MetricsLog, read_rows
from headrace.trainer.record import RunRecord


def step(loss, supervised, *, skipped=False, norm=1.0):
    return StepResult(
        loss=loss, num_supervised_tokens=supervised, num_tokens=999, grad_norm=norm,
        skipped=skipped, exposed_seconds={"h2d": 0.5, "update": 0.25},
    )  # fmt: skip


def test_the_logged_loss_is_the_mean_over_tokens_not_over_steps():
    meter = Meter()
    meter.add(step(2.0, 11), num_tokens=12, seconds=1.0)
    last = step(4.0, 101)
    meter.add(last, num_tokens=102, seconds=3.0)
    row = meter.row(last, learning_rate=1e-3)
    assert row["loss"] == (2.0 * 11 + 4.0 * 101) / 112
    # 999 positions with padding count nowhere.
    assert (row["num_tokens"], row["num_supervised_tokens"]) == (114, 112)
    assert row["tokens_per_second"] == 114 / 4.0
    assert row["supervised_tokens_per_second"] == 112 / 4.0
    assert row["step_seconds"] == 2.0
    assert row["exposed_seconds"] == {"h2d": 1.0, "update": 0.5}
    # The next interval begins anew, the totals go on.
    meter.add(last, num_tokens=102, seconds=1.0)
    row = meter.row(last, learning_rate=1e-3)
    assert row["loss"] == 4.0
    assert row["num_tokens"] == 216
    assert row["exposed_seconds"] == {"h2d": 0.5, "update": 0.25}


def test_a_skipped_step_does_not_poison_the_interval():
    meter = Meter()
    meter.add(step(2.0, 10), num_tokens=10, seconds=1.0)
    bad = step(float("nan"), 10, skipped=True, norm=float("inf"))
    meter.add(bad, num_tokens=10, seconds=1.0)
    row = meter.row(bad, learning_rate=1e-3)
    assert row["loss"] == 2.0
    assert row["grad_norm"] is None
    assert row["num_skipped_steps"] == 1
    json.dumps(row, allow_nan=False)
    meter.add(bad, num_tokens=10, seconds=1.0)
    assert meter.row(bad, learning_rate=1e-3)["loss"] is None


def test_an_interval_goes_on_after_a_save():
    whole, part = Meter(), Meter()
    steps = [step(1 / 3, 7), step(2 / 7, 13), step(0.1, 3)]
    for result in steps:
        whole.add(result, num_tokens=9, seconds=0.1)
    part.add(steps[0], num_tokens=9, seconds=0.1)
    part = Meter(**json.loads(json.dumps(part.to_dict())))
    for result in steps[1:]:
        part.add(result, num_tokens=9, seconds=0.1)
    assert part == whole


@pytest.mark.parametrize("line", ["5", "[1]", '{"loss": 1}', '{"step": "x"}', "\0\0"])
def test_damaged_rows_end_a_file(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n' + line + "\n")
    assert read_rows(path) == [{"step": 1}]


@pytest.mark.parametrize("text", ["[]", '{"sessions": 5}', '{"sessions": ["x", {"seconds": 1}]}'])
def test_a_damaged_record_does_not_stop_a_resume(tmp_path, text):
    path = tmp_path / "run.json"
    path.write_text(text)
    RunRecord(path, {}, first_step=3, resumed_from="checkpoint-3")
    assert json.loads(path.read_text())["sessions"][-1]["first_step"] == 3


def test_rows_after_the_checkpoint_are_cut_off(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, last_step=0)
    for number in range(1, 6):
        log.append({"step": number, "loss": number / 3})
    log.close()
    with path.open("a") as file:
        file.write('{"step": 6, "lo')  # what a kill left
    assert [row["step"] for row in read_rows(path)] == [1, 2, 3, 4, 5]
    log = MetricsLog(path, last_step=3)
    log.append({"step": 4, "loss": 9.0})
    log.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3, 4]
    assert read_rows(path)[0]["loss"] == 1 / 3
    MetricsLog(path, last_step=0).close()
    assert path.read_text() == ""


def test_a_row_that_json_cannot_hold_is_refused(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl", last_step=0)
    with pytest.raises(ValueError, match="JSON"):
        log.append({"step": 1, "loss": float("nan")})
    log.close()
