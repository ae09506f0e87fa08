"""Whole runs on streamed datasets: nothing is tokenised ahead, a resume has the same bits."""

import json

import pytest
from safetensors.torch import load_file
from transformers import TrainerCallback

from headrace.data import streams as streams_module
from headrace.data.parts import plan_parts
from headrace.errors import ConfigError


class StopAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == self.step


@pytest.fixture
def streamed(tmp_path, corpus, sentences, monkeypatch):
    monkeypatch.setattr(streams_module, "plan_parts", lambda source: plan_parts(source, 600))
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps({"text": text}) + "\n" for text in sentences * 3))
    return [
        {"path": str(corpus), "streaming": True, "weight": 0.8},
        {"path": str(other), "streaming": True, "weight": 0.2},
    ]


def test_a_stopped_run_goes_on_to_the_same_bits(run_config, streamed, tmp_path):
    whole = run_config(datasets=streamed, output_dir=str(tmp_path / "whole"))
    run_config(datasets=streamed, callbacks=[StopAt(3)])
    resumed = run_config(datasets=streamed, resume_from_checkpoint="auto")
    assert (whole.step, resumed.step) == (8, 8)
    ours, theirs = (
        load_file(result.checkpoint / "model.safetensors") for result in (resumed, whole)
    )
    assert all(ours[name].equal(theirs[name]) for name in theirs)
    assert not (tmp_path / "cache" / "tokens").exists()
    record = json.loads((resumed.output_dir / "run.json").read_text())
    assert [fact["streamed"] for fact in record["datasets"]] == [True, True]
    with pytest.raises(ConfigError, match="weight of datasets"):
        run_config(
            datasets=[streamed[0] | {"weight": 0.5}, streamed[1]], resume_from_checkpoint="auto"
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_steps": -1}, "no epochs"),
        ({"save_strategy": "epoch"}, "no epochs"),
        ({"val_set_size": 0.1, "eval_steps": 2}, "val_set_size"),
        ({"datasets": [0, {"path": "x", "weight": 1}]}, "some datasets are streamed"),
        ({"eval_datasets": [0], "eval_steps": 2}, "is streamed; it is read again"),
    ],
)
def test_what_a_stream_cannot_do_is_refused(run_config, streamed, change, message):
    for key in ("datasets", "eval_datasets"):
        if key in change:
            change = change | {key: [streamed[0] if e == 0 else e for e in change[key]]}
    with pytest.raises(ConfigError, match=message):
        run_config(**{"datasets": streamed, **change})
