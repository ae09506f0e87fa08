"""Benchmarks on the live weights: scores equal the model's own, refusals come early."""

import json

import pytest
import torch
import yaml

from headrace.errors import ConfigError
from headrace.trainer import harness
from headrace.trainer.harness import score_requests
from headrace.trainer.metrics import read_rows
from tiny import make_engine, reference_model, tiny_config, tiny_state


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_scores_are_those_of_the_model_itself(family):
    spec, state = tiny_state(tiny_config(family))
    engine = make_engine(spec, state)
    model = reference_model(spec, state)
    generator = torch.Generator().manual_seed(0)
    requests = [
        (
            torch.randint(0, 96, (n,), generator=generator).tolist(),
            torch.randint(0, 96, (m,), generator=generator).tolist(),
        )
        for n, m in ((1, 1), (9, 3), (4, 12), (30, 5), (2, 2))
    ]
    with torch.no_grad():  # one continuation is what the model itself would say
        logits = model(torch.tensor([requests[1][0]])).logits[0, -1]
    requests.append((requests[1][0], [int(logits.argmax())]))
    found = score_requests(engine, requests, max_length=24, rows=2, group=2)
    for (context, continuation), (logprob, greedy) in zip(requests, found, strict=True):
        ids = torch.tensor([(context + continuation)[-25:]])
        with torch.no_grad():
            logprobs = model(ids[:, :-1]).logits.log_softmax(-1)[0, -len(continuation) :]
        targets = ids[0, -len(continuation) :]
        expected = logprobs.gather(1, targets[:, None]).sum()
        assert logprob == pytest.approx(float(expected), rel=1e-4, abs=1e-4)
        assert greedy == bool((logprobs.argmax(-1) == targets).all())
    assert found[-1][1]
    engine.close()


def test_a_harness_that_is_not_installed_is_refused_with_the_line_that_installs_it(
    run_config, monkeypatch
):
    monkeypatch.setattr(harness.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="not installed") as caught:
        run_config(lm_eval_tasks=["piqa"], eval_steps=4)
    assert caught.value.remedy == "pip install 'headrace[eval]'"


@pytest.fixture
def tasks(tmp_path, sentences):
    pytest.importorskip("lm_eval", reason="the eval extra is not installed")
    folder = tmp_path / "tasks"
    folder.mkdir()
    rows = [
        {"question": s.split(",")[0], "choices": [" yes", " no"], "answer": n % 2}
        for n, s in enumerate(sentences)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, kind in (("mill", "multiple_choice"), ("talk", "generate_until")):
        task = {
            "task": name, "dataset_path": "json", "output_type": kind, "test_split": "test",
            "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}},
            "doc_to_text": "{{question}}", "metadata": {"version": 1},
        }  # fmt: skip
        if kind == "multiple_choice":
            task |= {
                "doc_to_choice": "{{choices}}", "doc_to_target": "{{answer}}",
                "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
            }  # fmt: skip
        else:
            task |= {"doc_to_target": "{{choices[0]}}"}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(task))
    return folder


@pytest.mark.filterwarnings("default")
def test_a_task_is_scored_at_every_evaluation(run_config, tasks):
    result = run_config(lm_eval_tasks=["mill"], lm_eval_include_path=str(tasks), eval_steps=4)
    rows = read_rows(result.output_dir / "metrics.jsonl")
    scores = [row["lm_eval_mill_acc"] for row in rows if "lm_eval_mill_acc" in row]
    assert len(scores) == 2
    assert all(0 <= score <= 1 for score in scores)
    assert not any("eval_loss" in row for row in rows)


@pytest.mark.filterwarnings("default")
def test_a_task_that_generates_is_refused(run_config, tasks):
    with pytest.raises(ConfigError, match="generates text"):
        run_config(lm_eval_tasks=["talk"], lm_eval_include_path=str(tasks), eval_steps=4)
