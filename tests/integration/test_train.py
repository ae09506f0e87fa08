"""Whole trainings on the CPU: what they compute, what they leave, how they stop."""

import json
import math
import os
import signal
import time

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from headrace.errors import CapacityError, CheckpointError, ConfigError, DataError
from headrace.trainer import run, signals
from headrace.trainer.metrics import read_rows
from headrace.trainer.prepare import loop_settings

VARIANTS = [("qwen3", True), ("qwen3", False), ("llama", True), ("llama", False)]
TIMINGS = {
    "tokens_per_second", "supervised_tokens_per_second", "step_seconds", "exposed_seconds",
    "eval_seconds", "model_tflops", "mfu",
}  # fmt: skip


class At(TrainerCallback):
    """Does something after a step."""

    def __init__(self, step, action):
        self.step, self.action = step, action

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.action(control)


def stop(control):
    control.should_training_stop = True


def tensors(checkpoint):
    """Every tensor of a checkpoint, weights and optimizer, by file and name."""
    return {
        (file.name, name): tensor
        for file in sorted(checkpoint.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def assert_same_bits(one, other):
    a, b = tensors(one), tensors(other)
    assert a.keys() == b.keys()
    assert len(a) > 10
    for key, tensor in a.items():
        assert torch.equal(tensor.view(torch.uint8), b[key].view(torch.uint8)), key


def untimed(path):
    return [{k: v for k, v in row.items() if k not in TIMINGS} for row in read_rows(path)]


@pytest.mark.parametrize(("family", "tied"), VARIANTS)
def test_a_run_learns_and_leaves_what_it_promises(run_config, tiny_model, tmp_path, family, tied):
    corpus = tmp_path / "corpus.jsonl"
    result = run_config(
        model_config=tiny_model(family, tied=tied),
        max_steps=30,
        eval_datasets=[{"path": str(corpus), "name": "all"}],
        eval_steps=30,
        save_strategy="steps",
        save_steps=10,
        save_total_limit=2,
    )
    rows = read_rows(result.output_dir / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 31))
    assert rows[-1]["loss"] < rows[0]["loss"] - 1
    assert result.status == "finished"
    assert result.exit_code == 0
    assert result.num_steps == result.step == 30
    saved = sorted(path.name for path in result.output_dir.iterdir() if path.is_dir())
    assert saved == ["checkpoint-20", "checkpoint-30"]
    record = json.loads((result.output_dir / "run.json").read_text())
    assert record["status"] == "finished"
    assert record["num_parameters"] == result.num_parameters
    assert record["state_bytes"] == 12 * result.num_parameters
    assert len(record["model_hash"]) == 64
    # transformers loads the checkpoint and measures the same loss.
    model = AutoModelForCausalLM.from_pretrained(result.checkpoint, dtype=torch.float32)
    assert sum(p.numel() for p in model.parameters()) == result.num_parameters
    tokenizer = AutoTokenizer.from_pretrained(result.checkpoint)
    loss_sum, count = 0.0, 0
    with torch.no_grad():
        for line in corpus.read_text().splitlines():
            ids = [*tokenizer(json.loads(line)["text"])["input_ids"], tokenizer.eos_token_id]
            for start in range(0, len(ids) - 1, 64):
                piece = torch.tensor([ids[start : start + 64]])
                targets = torch.tensor(ids[start + 1 : start + 65])
                logits = model(piece).logits[0, : len(targets)]
                loss_sum += float(
                    torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
                )
                count += len(targets)
    assert result.eval_losses == {"all": pytest.approx(loss_sum / count, rel=1e-5)}


@pytest.mark.parametrize(("family", "tied"), VARIANTS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_resume_is_bitwise(run_config, tiny_model, tmp_path, family, tied, dtype):
    """Stopped after steps 3 and 5, inside epochs, a run ends with the bits of a whole one."""
    common = {
        "model_config": tiny_model(family, tied=tied),
        "dtype": dtype,
        "logging_steps": 2,
        "eval_datasets": [{"path": str(tmp_path / "corpus.jsonl")}],
        "eval_steps": 4,
    }
    whole = run_config(**common, output_dir=str(tmp_path / "whole"))
    for step in (3, 5):
        part = run_config(**common, resume_from_checkpoint="auto", callbacks=[At(step, stop)])
        assert (part.status, part.step) == ("stopped", step)
    resumed = run_config(**common, resume_from_checkpoint="auto")
    assert resumed.status == "finished"
    assert_same_bits(whole.checkpoint, resumed.checkpoint)
    ours, theirs = (untimed(r.output_dir / "metrics.jsonl") for r in (resumed, whole))
    assert ours == theirs
    sessions = json.loads((resumed.output_dir / "run.json").read_text())["sessions"]
    assert [s["first_step"] for s in sessions] == [0, 3, 5]


def test_a_finished_run_resumes_to_nothing(run_config):
    first = run_config()
    before = (first.output_dir / "metrics.jsonl").read_text()
    again = run_config(resume_from_checkpoint="auto")
    assert again.status == "finished"
    assert again.checkpoint == first.checkpoint
    assert (first.output_dir / "metrics.jsonl").read_text() == before


def test_a_partly_written_checkpoint_is_not_chosen(run_config, tmp_path):
    common = {"save_strategy": "steps", "save_steps": 2}
    whole = run_config(**common, output_dir=str(tmp_path / "whole"))
    run_config(**common, callbacks=[At(6, stop)])
    newest = tmp_path / "run" / "checkpoint-6"
    os.truncate(newest / "optimizer.safetensors", 1000)
    resumed = run_config(**common, resume_from_checkpoint="auto")
    sessions = json.loads((resumed.output_dir / "run.json").read_text())["sessions"]
    assert sessions[-1]["first_step"] == 4
    assert_same_bits(whole.checkpoint, resumed.checkpoint)
    ours, theirs = (untimed(r.output_dir / "metrics.jsonl") for r in (resumed, whole))
    assert ours == theirs
    (newest / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="not a complete checkpoint"):
        run_config(**common, resume_from_checkpoint=str(newest))


@pytest.mark.parametrize(
    ("number", "requeue", "code"),
    [(signal.SIGINT, False, 130), (signal.SIGTERM, False, 143), (signal.SIGTERM, True, 75)],
)
def test_a_signal_finishes_the_step_and_saves(run_config, tmp_path, number, requeue, code):
    common = {"eval_datasets": [{"path": str(tmp_path / "corpus.jsonl")}], "eval_steps": 4}
    whole = run_config(**common, output_dir=str(tmp_path / "whole"))
    stopped = run_config(
        **common, requeue=requeue, callbacks=[At(4, lambda _: os.kill(os.getpid(), number))]
    )
    assert (stopped.status, stopped.exit_code, stopped.step) == ("stopped", code, 4)
    assert stopped.checkpoint.name == "checkpoint-4"
    # The evaluation that was due is made by the session that goes on.
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert "eval_loss" not in rows[-1]
    resumed = run_config(**common, resume_from_checkpoint="auto")
    assert_same_bits(whole.checkpoint, resumed.checkpoint)
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    expected = read_rows(tmp_path / "whole" / "metrics.jsonl")
    assert [r["eval_loss"] for r in rows if "eval_loss" in r] == [
        r["eval_loss"] for r in expected if "eval_loss" in r
    ]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_interrupts(run_config, tmp_path, monkeypatch, number):
    monkeypatch.setattr(signals, "BURST_SECONDS", 0.01)

    def twice(_control):
        # To this thread: signals that another thread is handed at once count as one.
        signal.raise_signal(signal.SIGTERM)
        time.sleep(0.02)
        signal.raise_signal(number)

    before = signal.getsignal(signal.SIGINT)  # in the background it may be ignored
    with pytest.raises(KeyboardInterrupt) as caught:
        run_config(callbacks=[At(3, twice)])
    assert caught.value.exit_code == 128 + number
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["status"] == "interrupted"
    assert signal.getsignal(signal.SIGINT) is before


def test_a_burst_of_signals_is_one_request(run_config):
    """A terminal's SIGINT to the whole group, a launcher's SIGTERM besides, and again."""

    def burst(_control):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            signal.raise_signal(number)

    stopped = run_config(callbacks=[At(3, burst)])
    assert (stopped.status, stopped.exit_code, stopped.step) == ("stopped", 130, 3)
    assert stopped.checkpoint.name == "checkpoint-3"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_before_the_first_step_ends_at_once(
    run_config, tmp_path, monkeypatch, number, code
):
    """Nothing is lost yet, and nothing is left that a run began."""
    monkeypatch.setattr(
        "headrace.trainer.prepare.open_data", lambda *_, **__: signal.raise_signal(number)
    )
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt, match=f"{number.name} before the first step") as caught:
        run_config()
    assert caught.value.exit_code == code
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_after_the_last_step_changes_nothing(run_config, tmp_path, monkeypatch):
    """The run is finished, and reading it once more for its record is not broken off."""
    real = run.model_hash

    def signalled(checkpoint):
        signal.raise_signal(signal.SIGTERM)
        return real(checkpoint)

    monkeypatch.setattr(run, "model_hash", signalled)
    finished = run_config(max_steps=2)
    assert (finished.status, finished.exit_code) == ("finished", 0)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "finished"


def test_a_signal_in_the_last_step_leaves_its_evaluation_to_the_next_session(run_config, tmp_path):
    """So the run is not finished, and a scheduler starts it again."""
    common = {"eval_datasets": [{"path": str(tmp_path / "corpus.jsonl")}], "eval_steps": 4}
    stopped = run_config(
        **common,
        requeue=True,
        callbacks=[At(8, lambda _: os.kill(os.getpid(), signal.SIGTERM))],
    )
    assert (stopped.status, stopped.exit_code, stopped.step) == ("stopped", 75, 8)
    finished = run_config(**common, requeue=True, resume_from_checkpoint="auto")
    assert (finished.status, finished.exit_code, finished.step) == ("finished", 0, 8)
    assert finished.eval_losses
    assert "eval_loss" in read_rows(tmp_path / "run" / "metrics.jsonl")[-1]


def plain_steps(config, make_batches, learning_rates, *, max_grad_norm):
    """The same steps in plain PyTorch: sums of token losses over the global batch's count."""
    model = AutoModelForCausalLM.from_pretrained(config, dtype=torch.float32)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    )
    for batches, learning_rate in zip(make_batches, learning_rates, strict=True):
        count = sum(int((b.targets_BT != -100).sum()) for b in batches)
        for b in batches:
            logits = model(b.input_ids_BT, position_ids=b.position_ids_BT).logits
            loss = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), b.targets_BT.flatten(), ignore_index=-100, reduction="sum"
            )
            (loss / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.fixture
def uneven(tmp_path):
    """Rows of 12, 102, 7, 30 and 60 tokens."""
    path = tmp_path / "uneven.jsonl"
    generator = torch.Generator().manual_seed(0)
    rows = [
        {"input_ids": torch.randint(1, 300, (n,), generator=generator).tolist()}
        for n in (12, 102, 7, 30, 60)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def start(run_config, tmp_path):
    """A folder with the weights that the runs of a comparison start from."""
    result = run_config(
        max_steps=1, warmup_steps=0, learning_rate=1e-9, output_dir=str(tmp_path / "start"),
        dtype="float32",
    )  # fmt: skip
    return result.checkpoint


def record_batches(monkeypatch):
    """The micro-batches and learning rates of every step of the runs that follow.

    Their model was trained before, so that its self-test is over.
    """
    from headrace.engine import Engine  # noqa: PLC0415 - what is watched

    steps, rates = [], []
    step = Engine.step

    def watched(self, micro_batches, *, learning_rate, max_grad_norm=None):
        steps.append(list(micro_batches))
        rates.append(learning_rate)
        return step(self, micro_batches, learning_rate=learning_rate, max_grad_norm=max_grad_norm)

    monkeypatch.setattr(Engine, "step", watched)
    return steps, rates


@pytest.mark.parametrize("layout", [(1, 5), (2, 3), (5, 1), (1, 4)])
def test_means_of_means_and_short_windows(run_config, uneven, start, monkeypatch, layout):
    """Micro-batches of 11, 101, 6, 29 and 59 supervised tokens, the last window shorter.

    However they are split, two epochs end where plain PyTorch ends with the mean over the
    supervised tokens of each global batch. (1, 4) has a second step of one micro-batch.
    """
    size, accumulation = layout
    steps, rates = record_batches(monkeypatch)
    result = run_config(
        model_config=None, model_name_or_path=str(start), tokenizer_name_or_path=None,
        datasets=[{"path": str(uneven), "type": "tokens"}], packing=False, max_length=128,
        per_device_train_batch_size=size, gradient_accumulation_steps=accumulation,
        max_steps=-1, num_train_epochs=2, dtype="float32", max_grad_norm=0.5,
        learning_rate=1e-3, warmup_steps=0, lr_scheduler_type="constant",
    )  # fmt: skip
    per_epoch = -(-5 // (size * accumulation))
    assert len(steps) == result.num_steps == 2 * per_epoch
    assert sum(sum(b.num_supervised_tokens for b in s) for s in steps[:per_epoch]) == 206
    if layout == (1, 4):
        assert [len(s) for s in steps] == [4, 1, 4, 1]
    expected = plain_steps(start, steps, rates, max_grad_norm=0.5)
    ours = AutoModelForCausalLM.from_pretrained(result.checkpoint, dtype=torch.float32)
    begin = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    for (name, a), b, c in zip(
        ours.named_parameters(), expected.parameters(), begin.parameters(), strict=True
    ):
        moved = (b - c).abs().max()
        assert moved > 1e-4, name
        # float32 sums in another order; a mean of means differs by more than 10% of the move.
        assert (a - b).abs().max() < 1e-2 * moved, name


def test_packed_documents_see_each_other_not(run_config, start, tmp_path):
    """Packed or one a row, the evaluation loss is the same; another first document changes none
    of the others'."""
    generator = torch.Generator().manual_seed(1)
    documents = [
        torch.randint(1, 300, (n,), generator=generator).tolist() for n in (20, 30, 12, 25)
    ]

    def loss(rows, name, **settings):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        result = run_config(
            model_config=None, model_name_or_path=str(start), tokenizer_name_or_path=None,
            dtype="float32", max_steps=1, learning_rate=1e-12, warmup_steps=0,
            datasets=[{"path": str(path), "type": "tokens"}], max_length=96,
            eval_datasets=[{"path": str(path), "type": "tokens", "name": "x"}], eval_steps=1,
            output_dir=str(tmp_path / name), **settings,
        )  # fmt: skip
        return result.eval_losses["x"]

    rows = [{"input_ids": ids} for ids in documents]
    packed = loss(rows, "packed", packing=True)
    assert packed == pytest.approx(loss(rows, "unpacked", packing=False), rel=1e-6)
    masked = [{"input_ids": documents[0], "labels": [-100] * 20}, *rows[1:]]
    other = [{"input_ids": documents[0][::-1], "labels": [-100] * 20}, *rows[1:]]
    assert loss(masked, "masked") == loss(other, "other")
    assert loss(masked, "again") != packed


def test_a_full_disk_leaves_the_previous_checkpoint(run_config, tmp_path):
    import resource  # noqa: PLC0415 - only here

    common = {"save_strategy": "steps", "save_steps": 2}
    whole = run_config(**common, output_dir=str(tmp_path / "whole"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(_control):
        # A write past this size fails as one to a full disk does.
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))

    try:
        with pytest.raises(CheckpointError, match="earlier checkpoints are untouched"):
            run_config(**common, callbacks=[At(4, fill)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    folders = sorted(p.name for p in (tmp_path / "run").iterdir() if p.is_dir())
    assert folders == ["checkpoint-2"]
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["status"] == "failed"
    resumed = run_config(**common, resume_from_checkpoint="auto")
    assert_same_bits(whole.checkpoint, resumed.checkpoint)


def test_two_runs_never_share_a_folder(run_config, tmp_path):
    def second(_control):
        with pytest.raises(ConfigError, match="another process is training into"):
            run_config(resume_from_checkpoint="auto")

    assert run_config(callbacks=[At(2, second)]).status == "finished"


def test_an_earlier_run_is_not_mixed_in(run_config, tmp_path):
    run_config(callbacks=[At(5, stop)])
    with pytest.raises(ConfigError, match="holds checkpoint-5 of an earlier run") as caught:
        run_config()
    assert "overwrite_output_dir" in caught.value.remedy
    result = run_config(overwrite_output_dir=True, max_steps=3)
    assert [p.name for p in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-3"]
    assert [row["step"] for row in read_rows(result.output_dir / "metrics.jsonl")] == [1, 2, 3]


def test_going_back_leaves_no_later_checkpoint_to_be_mixed_in(run_config, tmp_path):
    common = {"save_strategy": "steps", "save_steps": 2}
    run_config(**common)
    back = {"resume_from_checkpoint": str(tmp_path / "run" / "checkpoint-4"), "learning_rate": 1e-3}
    with pytest.raises(ConfigError, match="holds checkpoint-8 of an earlier run"):
        run_config(**common, **back)
    run_config(**common, **back, overwrite_output_dir=True, callbacks=[At(5, stop)])
    left = sorted(p.name for p in (tmp_path / "run").glob("checkpoint-*"))
    assert left == ["checkpoint-2", "checkpoint-4", "checkpoint-5"]
    # Into another folder it leaves the first run as it is.
    other = run_config(**common, **back, output_dir=str(tmp_path / "other"))
    assert other.status == "finished"
    assert sorted(p.name for p in (tmp_path / "run").glob("checkpoint-*")) == left


def test_another_dtype_is_not_resumed(run_config, tmp_path):
    run_config(callbacks=[At(2, stop)])
    with pytest.raises(CheckpointError, match="saved with dtype bfloat16") as caught:
        run_config(resume_from_checkpoint="auto", dtype="float32")
    assert caught.value.remedy == "dtype: bfloat16"


def test_other_data_is_not_resumed(run_config, tmp_path):
    run_config(callbacks=[At(3, stop)])
    for change in ({"max_length": 32}, {"seed": 1}, {"shuffle": False}):
        with pytest.raises(ConfigError, match="was trained on other data"):
            run_config(resume_from_checkpoint="auto", **change)
    (tmp_path / "corpus.jsonl").write_text(
        '{"text": "Something else entirely, and long enough."}\n'
    )
    with pytest.raises(ConfigError, match=r"contents of datasets\.0"):
        run_config(resume_from_checkpoint="auto")


def test_changed_settings_are_said(run_config, capsys):
    run_config(callbacks=[At(3, stop)])
    run_config(resume_from_checkpoint="auto", learning_rate=1e-3, progress="lines", logging_steps=4)
    said = capsys.readouterr().out
    assert "resuming from" in said
    assert "changed since: learning_rate: 0.01 -> 0.001" in said
    assert "logging_steps" not in said.split("plan:")[0]


def test_only_the_settings_that_changed_are_said(run_config, tiny_model, capsys):
    run_config(callbacks=[At(3, stop)], param_groups=[{"pattern": "norm"}])
    run_config(
        resume_from_checkpoint="auto",
        progress="lines",
        engine={"loss_chunk_tokens": 16},
        model_config=tiny_model(rms_norm_eps=1e-5),
        param_groups=[{"pattern": "norm", "learning_rate_scale": 0.5}],
    )
    said = [line for line in capsys.readouterr().out.splitlines() if "changed since" in line]
    assert sorted(said) == [
        "changed since: engine.loss_chunk_tokens: 1024 -> 16",
        "changed since: model_config.rms_norm_eps: None -> 1e-05",
        "changed since: param_groups.0.learning_rate_scale: 1.0 -> 0.5",
    ]


@pytest.mark.parametrize("change", [{"num_hidden_layers": 1}, {"intermediate_size": 32}])
def test_a_checkpoint_of_another_model_is_refused_before_tokenising(
    run_config, tiny_model, monkeypatch, change
):
    run_config(callbacks=[At(3, stop)])

    def forbidden(*_args, **_kwargs):
        raise AssertionError("tokenised first")

    monkeypatch.setattr("headrace.trainer.datasets.tokenise", forbidden)
    with pytest.raises(CheckpointError, match=r"another model|the model's is"):
        run_config(resume_from_checkpoint="auto", model_config=tiny_model(**change))


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"datasets": [{"path": "absent.jsonl"}]}, DataError, "does not exist"),
        ({"max_length": 129}, ConfigError, "max_length is 129, the model has 128 positions"),
        ({"tokenizer_name_or_path": None}, ConfigError, "brings no tokenizer"),
        ({"eos_token": "<stop>"}, ConfigError, "'<stop>' is not a token"),
        ({"model_config": {"hidden_size": 32}}, ConfigError, "no model_type"),
        ({"model_config": {"model_type": "qwen9"}}, ConfigError, "knows no model_type 'qwen9'"),
        ({"model_config": "absent/config.json"}, ConfigError, "neither a folder nor"),
        ({"model_config": None, "model_name_or_path": "nobody/nothing"}, ConfigError, "hub cache"),
        ({"device": "cuda"}, ConfigError, "sees no GPU"),
        ({"device": "tpu9"}, ConfigError, "is no device"),
        ({"report_to": ["nowhere"]}, ConfigError, "nowhere is not supported"),
        ({"resume_from_checkpoint": "absent"}, CheckpointError, "not a complete checkpoint"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="one case needs a machine without a GPU")
def test_what_cannot_work_is_refused_before_anything_is_written(
    run_config, tmp_path, change, kind, message
):
    with pytest.raises(kind, match=message) as caught:
        run_config(**change)
    assert caught.value.remedy
    left = {p.name for p in (tmp_path / "run").iterdir()} if (tmp_path / "run").exists() else set()
    assert left <= {".lock"}


@pytest.mark.parametrize("below", ["", "run"])
def test_an_output_dir_that_is_a_file_is_refused(run_config, tmp_path, below):
    taken = tmp_path / "taken"
    taken.write_text("kept")
    with pytest.raises(ConfigError, match="cannot be written") as caught:
        run_config(output_dir=str(taken / below))
    assert caught.value.exit_code == 2
    assert taken.read_text() == "kept"


def test_a_vocabulary_smaller_than_the_tokenizer_is_refused(run_config, tiny_model):
    with pytest.raises(ConfigError, match="the model's vocabulary 100"):
        run_config(model_config=tiny_model(vocab_size=100))


def test_too_little_memory_is_exit_3_before_tokenising(run_config, tmp_path, monkeypatch):
    monkeypatch.setenv("HEADRACE_HOST_MEMORY", "300MiB")
    with pytest.raises(CapacityError, match="needs") as caught:
        run_config()
    assert caught.value.exit_code == 3
    assert "raise HEADRACE_HOST_MEMORY" in caught.value.remedy
    assert not (tmp_path / "cache").exists()


def test_too_little_disk_is_exit_3_with_the_arithmetic(run_config, tmp_path, monkeypatch):
    import shutil  # noqa: PLC0415 - what is replaced

    usage = shutil.disk_usage(tmp_path)._replace(free=3_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    run_config(output_dir=str(tmp_path / "one"))
    with pytest.raises(CapacityError, match=r"checkpoints need 8 x .* free") as caught:
        run_config(save_strategy="steps", save_steps=1)
    assert "set save_total_limit" in caught.value.remedy
    run_config(save_strategy="steps", save_steps=1, save_total_limit=1)


def test_epochs_count_steps_as_transformers_does(make_config):
    from headrace.trainer import resolve  # noqa: PLC0415 - only here

    def steps(epochs, per_epoch):
        config, _ = resolve(make_config(max_steps=-1, num_train_epochs=epochs))
        return loop_settings(config, per_epoch).num_steps

    for epochs, per_epoch in ((1, 7), (3, 7), (0.5, 7), (2.3, 11), (0.01, 5)):
        assert steps(epochs, per_epoch) == math.ceil(epochs * per_epoch)


def test_gradients_that_are_not_finite_are_counted_not_applied(run_config, monkeypatch):
    from headrace.engine import update  # noqa: PLC0415 - what is replaced

    norm = update.Updater.gradient_norm
    calls = []

    def broken(self):
        calls.append(None)
        return math.inf if len(calls) == 3 else norm(self)

    monkeypatch.setattr(update.Updater, "gradient_norm", broken)
    result = run_config()
    rows = read_rows(result.output_dir / "metrics.jsonl")
    assert [row["num_skipped_steps"] for row in rows] == [0, 0, 1, 1, 1, 1, 1, 1]
    assert rows[2]["grad_norm"] is None
    assert json.loads((result.output_dir / "run.json").read_text())["num_skipped_steps"] == 1


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
def test_compiled_layers_are_counted_by_row_and_run(run_config):
    """Packed rows: on the CPU attention inside documents is what no graph can do."""
    seen = []

    class Log(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            seen.append(logs)

    engine = {"compile": True, "compile_backend": "eager"}
    result = run_config(max_steps=2, packing=True, engine=engine, callbacks=[Log()])
    rows = read_rows(result.output_dir / "metrics.jsonl")
    for row, logs in zip(rows, seen[: len(rows)], strict=True):
        assert row["compile"]["eager_calls"] > 0
        assert row["compile"]["graphs"] == logs["compile_graphs"] > 0  # of the loss
    record = json.loads((result.output_dir / "run.json").read_text())["compile"]
    assert {k: record[k] for k in rows[-1]["compile"]} == rows[-1]["compile"]
    assert sum(record["eager_reasons"].values()) == record["eager_calls"]


def test_layers_that_are_not_compiled_are_not_counted(run_config):
    result = run_config(max_steps=1)
    assert "compile" not in read_rows(result.output_dir / "metrics.jsonl")[0]
    assert "compile" not in json.loads((result.output_dir / "run.json").read_text())
