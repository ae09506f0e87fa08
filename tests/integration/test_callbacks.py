"""Callbacks with transformers' signature, and transformers' own."""

import json

import pytest
from transformers import EarlyStoppingCallback, TrainerCallback
from transformers.trainer_callback import ExportableState

from headrace.errors import ConfigError
from headrace.trainer.metrics import read_rows


class Recorder(TrainerCallback):
    """Writes down every event."""

    def __init__(self):
        self.events = []

    def __getattribute__(self, name):
        if name.startswith("on_"):
            return lambda args, state, control, **kwargs: self.events.append(
                (name, state.global_step, kwargs)
            )
        return super().__getattribute__(name)


def test_events_come_in_transformers_order(run_config, tmp_path):
    recorder = Recorder()
    run_config(
        callbacks=[recorder], max_steps=4, save_strategy="steps", save_steps=2,
        eval_datasets=[{"path": str(tmp_path / "corpus.jsonl")}], eval_steps=2, logging_steps=2,
        async_save=False,
    )  # fmt: skip
    one_step = ["on_step_begin", "on_step_end"]
    seen = [(name, step) for name, step, _ in recorder.events if "epoch" not in name]
    assert [name for name, _ in seen] == [
        "on_train_begin",
        *one_step, *one_step, "on_log", "on_evaluate", "on_save",
        *one_step, *one_step, "on_log", "on_evaluate", "on_save",
        "on_train_end",
    ]  # fmt: skip
    assert [step for name, step in seen if name == "on_save"] == [2, 4]
    kwargs = next(kwargs for name, _, kwargs in recorder.events if name == "on_log")
    assert kwargs["model"].config.model_type == "qwen3"
    assert kwargs["processing_class"].eos_token == "<eos>"
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert kwargs["logs"]["loss"] == rows[0]["loss"]
    assert kwargs["logs"]["eval_loss"] == rows[0]["eval_loss"]
    assert all(isinstance(value, (int, float)) for value in kwargs["logs"].values())
    metrics = [kwargs["metrics"] for name, _, kwargs in recorder.events if name == "on_evaluate"]
    assert [m["eval_loss"] for m in metrics] == [row["eval_loss"] for row in rows]


def test_epochs_are_announced(run_config):
    recorder = Recorder()
    result = run_config(callbacks=[recorder], max_steps=-1, num_train_epochs=2)
    names = [(n, s) for n, s, _ in recorder.events if "epoch" in n]
    half = result.num_steps // 2
    assert names == [
        ("on_epoch_begin", 0), ("on_epoch_end", half),
        ("on_epoch_begin", half), ("on_epoch_end", 2 * half),
    ]  # fmt: skip


def test_a_callback_may_ask_for_a_log_a_save_an_evaluation_and_a_stop(run_config, tmp_path):
    class Asks(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_log = state.global_step == 2
            control.should_evaluate = state.global_step == 3
            control.should_save = state.global_step == 4
            control.should_training_stop = state.global_step == 5
            return control

    result = run_config(
        callbacks=[Asks()], logging_steps=100,
        eval_datasets=[{"path": str(tmp_path / "corpus.jsonl")}], eval_steps=100,
    )  # fmt: skip
    assert (result.status, result.exit_code, result.step) == ("stopped", 0, 5)
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert [(r["step"], "loss" in r, "eval_loss" in r) for r in rows] == [
        (2, True, False), (3, False, True),
    ]  # fmt: skip
    saved = sorted(p.name for p in (tmp_path / "run").glob("checkpoint-*"))
    assert saved == ["checkpoint-4", "checkpoint-5"]


def test_arguments_have_every_name_that_integrations_read(run_config, tmp_path):
    seen = {}

    class Reads(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            seen["names"] = [
                args.run_name, args.logging_strategy, args.project, args.load_best_model_at_end,
            ]  # fmt: skip
            seen["rate"] = (args.learning_rate, args.per_device_train_batch_size)
            seen["json"] = json.loads(args.to_json_string())
            seen["plain"] = args.to_sanitized_dict()
            seen["model"] = (kwargs["model"].num_parameters(), state.max_steps)

    result = run_config(callbacks=[Reads()], max_steps=1)
    assert seen["names"][0] == "run"
    assert seen["rate"] == (1e-2, 2)
    assert seen["json"]["max_length"] == 64
    assert all(isinstance(v, (bool, int, float, str)) for v in seen["plain"].values())
    assert seen["model"] == (result.num_parameters, 1)


@pytest.mark.filterwarnings("ignore:Using EarlyStoppingCallback")
def test_transformers_early_stopping_works_and_keeps_its_count_over_a_resume(run_config, tmp_path):
    def run(*callbacks, **changes):
        return run_config(
            callbacks=callbacks, max_steps=12, eval_steps=1, learning_rate=1e-12,
            eval_datasets=[{"path": str(tmp_path / "corpus.jsonl")}], **changes,
        )  # fmt: skip

    # At this learning rate nothing improves by 0.01: the first evaluation is the best.
    patient = EarlyStoppingCallback(early_stopping_patience=4, early_stopping_threshold=0.01)
    assert isinstance(patient, ExportableState)
    whole = run(patient, output_dir=str(tmp_path / "whole"))
    assert (whole.status, whole.step) == ("stopped", 5)

    class StopAt3(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 3

    run(EarlyStoppingCallback(4, 0.01), StopAt3())
    resumed = run(EarlyStoppingCallback(4, 0.01), resume_from_checkpoint="auto")
    assert resumed.step == whole.step


def test_tensorboard_through_transformers(run_config, tmp_path):
    pytest.importorskip("tensorboard", reason="the track extra is not installed")
    result = run_config(report_to=["tensorboard"], max_steps=2)
    assert list(result.output_dir.rglob("events.out.tfevents*"))


def test_a_tracker_that_is_not_installed_is_refused_by_name(run_config, monkeypatch):
    from transformers.integrations import integration_utils  # noqa: PLC0415 - what is replaced

    monkeypatch.setattr(integration_utils, "is_wandb_available", lambda: False)
    with pytest.raises(ConfigError, match="wandb cannot be used") as caught:
        run_config(report_to="wandb")
    assert caught.value.remedy == "pip install wandb"
