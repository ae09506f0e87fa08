"""``headrace train`` as users call it: output, exit codes, signals."""

import errno
import json
import os
import signal
import subprocess
import sys
import time

import pytest
import yaml

from headrace.cli import main
from headrace.trainer.metrics import MetricsLog, read_rows


@pytest.fixture
def config_file(make_config, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(make_config(progress="auto")))
    return str(path)


def call(capsys, *arguments):
    """Exit code, stdout and stderr of a command."""
    with pytest.raises(SystemExit) as end:
        main(arguments)
    captured = capsys.readouterr()
    return end.value.code, captured.out, captured.err


def test_a_run_says_what_it_does(capsys, config_file, tmp_path):
    code, out, err = call(capsys, "train", config_file, "max_steps=2", "sequence_len=64")
    assert code == 0
    assert err == ""
    lines = out.splitlines()
    assert lines[0] == "config: sequence_len -> max_length"
    assert lines[1].startswith("model: Qwen3ForCausalLM trains exactly: gradients within ")
    assert lines[2].startswith("model: Qwen3ForCausalLM, ")
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert f"state: 12 bytes a parameter = {12 * record['num_parameters']:,} bytes" in lines[3]
    assert "bytes of alignment" in lines[3]
    assert any(line.startswith("step 2/2  loss ") for line in lines)
    assert f"saved {tmp_path / 'run' / 'checkpoint-2'}" in lines
    assert lines[-1].startswith("finished at step 2/2")
    assert "\x1b" not in out
    saved = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert saved["max_steps"] == 2
    # The saved configuration runs again as it is.
    code, _, _ = call(
        capsys, "train", str(tmp_path / "run" / "config.yaml"), f"output_dir={tmp_path / 'again'}"
    )
    assert code == 0
    ours, theirs = (
        [row["loss"] for row in read_rows(tmp_path / name / "metrics.jsonl")]
        for name in ("run", "again")
    )
    assert ours == theirs


def test_json_is_one_object_on_stdout(capsys, config_file, tmp_path):
    code, out, err = call(capsys, "train", config_file, "max_steps=2", "--json")
    assert code == 0
    result = json.loads(out)
    assert result["status"] == "finished"
    assert result["checkpoint"] == str(tmp_path / "run" / "checkpoint-2")
    assert result["state_bytes"] == 12 * result["num_parameters"]
    assert "step 2/2" in err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["learning_rat=1"], 2, "did you mean learning_rate?"),
        (["datasets.0.path=absent.jsonl"], 2, "does not exist"),
        (["max_length=4096"], 2, "the model has 128 positions"),
        (["resume_from_checkpoint=absent"], 1, "not a complete checkpoint"),
        (["save_steps"], 2, "is not key=value"),
    ],
)
def test_a_refusal_is_one_message_with_a_remedy_and_its_exit_code(
    capsys, config_file, arguments, code, message
):
    found, out, err = call(capsys, "train", config_file, *arguments)
    assert found == code
    assert err.startswith("headrace train: ")
    assert message in err
    assert "remedy:" in err
    assert "Traceback" not in err
    assert "step " not in out


def test_bad_rows_are_named_by_line(capsys, config_file, tmp_path):
    (tmp_path / "corpus.jsonl").write_text('{"text": "fine"}\n{"txt": "not"}\n')
    code, _, err = call(capsys, "train", config_file)
    assert code == 2
    assert f"{tmp_path / 'corpus.jsonl'}:2: the row has no 'text' (it has 'txt')" in err
    (tmp_path / "corpus.jsonl").write_text("")
    code, _, err = call(capsys, "train", config_file)
    assert code == 2
    assert "is empty" in err


def test_too_little_memory_exits_with_3(capsys, config_file, monkeypatch):
    monkeypatch.setenv("HEADRACE_HOST_MEMORY", "300MiB")
    code, _, err = call(capsys, "train", config_file)
    assert code == 3
    assert "HEADRACE_HOST_MEMORY" in err


@pytest.mark.parametrize("name", ["metrics.jsonl", "run.json", "config.yaml", ".lock"])
def test_a_file_of_the_run_that_cannot_be_written_is_named(capsys, config_file, tmp_path, name):
    (tmp_path / "run" / name).mkdir(parents=True)
    code, _, err = call(capsys, "train", config_file)
    assert code == 2
    assert "cannot be written: Is a directory" in err
    assert str(tmp_path / "run" / name) in err


def test_a_disk_that_is_full_is_no_traceback_wherever_it_is_found(
    capsys, config_file, tmp_path, monkeypatch
):
    def full(self, row):
        raise OSError(errno.ENOSPC, "No space left on device", "metrics.jsonl")

    monkeypatch.setattr(MetricsLog, "append", full)
    code, _, err = call(capsys, "train", config_file)
    assert code == 3
    assert "is full (metrics.jsonl)" in err


def test_dry_run_and_schema(capsys, config_file, tmp_path):
    code, out, _ = call(capsys, "train", config_file, "--dry-run", "num_epochs=2")
    assert code == 0
    assert "# num_epochs -> num_train_epochs" in out
    assert yaml.safe_load(out)["num_train_epochs"] == 2
    assert not (tmp_path / "run").exists()
    code, out, _ = call(capsys, "train", "--schema")
    assert code == 0
    assert "learning_rate" in json.loads(out)["properties"]
    code, _, err = call(capsys, "train")
    assert code == 2
    assert "needs a configuration file" in err


def test_a_dry_run_says_what_is_not_here(capsys, config_file, tmp_path):
    code, out, _ = call(capsys, "train", config_file, "--dry-run")
    assert code == 0
    assert "not on this machine" not in out
    changes = [
        "model_config=",
        "model_name_or_path=Qwen/Qwen3-0.6B-Bose",
        "datasets.0.path=no.jsonl",
    ]
    code, out, _ = call(capsys, "train", config_file, "--dry-run", *changes)
    assert code == 0
    assert "# not on this machine: model_name_or_path: 'Qwen/Qwen3-0.6B-Bose' is neither" in out
    assert "# not on this machine: datasets.0: " in out
    assert yaml.safe_load(out)["model_name_or_path"] == "Qwen/Qwen3-0.6B-Bose"
    code, out, _ = call(capsys, "train", config_file, "--dry-run", "--json", *changes)
    assert [line.split(":")[0] for line in json.loads(out)["absent"]] == [
        "model_name_or_path",
        "datasets.0",
    ]


def test_text_without_a_tokenizer_is_refused_by_a_dry_run_as_by_a_run(capsys, config_file):
    for arguments in (["--dry-run"], []):
        code, _, err = call(
            capsys, "train", config_file, "tokenizer_name_or_path=", "datasets.0.type=text",
            *arguments,
        )  # fmt: skip
        assert code == 2
        assert "brings no tokenizer" in err
        assert "headrace corpus build trains" in err


@pytest.mark.parametrize("arguments", [["--dry-run"], []])
def test_the_folder_of_a_run_is_no_model_and_its_checkpoint_is_named(
    capsys, config_file, tmp_path, arguments
):
    checkpoint = tmp_path / "earlier" / "checkpoint-30"
    checkpoint.mkdir(parents=True)
    code, out, err = call(
        capsys, "train", config_file, "model_config=", "tokenizer_name_or_path=",
        f"model_name_or_path={tmp_path / 'earlier'}", *arguments,
    )  # fmt: skip
    assert (code, f"such as {checkpoint}" in out + err) == (0 if arguments else 2, True)


def test_sigterm_saves_and_exits_with_143(config_file, tmp_path):
    command = [sys.executable, "-m", "headrace", "train", config_file, "max_steps=100000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not read_rows(tmp_path / "run" / "metrics.jsonl"):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 143
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["status"] == "stopped"
    assert (tmp_path / "run" / record["checkpoint"] / "model.safetensors").is_file()
    assert f"stopped at step {record['sessions'][-1]['last_step']}" in out
    assert (
        f"with resume_from_checkpoint=auto goes on from {tmp_path / 'run' / 'checkpoint-'}" in out
    )


@pytest.mark.parametrize("pause", [0.0, 2.2])
def test_a_second_sigterm(config_file, tmp_path, pause):
    """At once the same request; later the end, without the save that takes minutes here."""
    slow = (
        "import sys, time\nfrom headrace.store.snapshot import Snapshot\n"
        "read = Snapshot.unit\n"
        f"Snapshot.unit = lambda *a: (time.sleep({0.0 if pause == 0 else 1.5}), read(*a))[1]\n"
        "from headrace.cli import main\nmain(sys.argv[1:])\n"
    )
    command = [sys.executable, "-c", slow, "train", config_file, "max_steps=100000"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not read_rows(tmp_path / "run" / "metrics.jsonl"):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGTERM)
    time.sleep(pause)
    os.kill(process.pid, signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 143
    assert "finishing the step, then saving" in err
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["status"] == ("stopped" if pause == 0 else "interrupted")
    assert bool(list((tmp_path / "run").glob("checkpoint-*"))) == (pause == 0)
    assert ("stopped at once by a second signal, SIGTERM" in err) == (pause > 0)


def test_a_trace_is_written_where_it_was_asked_for(capsys, config_file, tmp_path):
    trace = tmp_path / "traces" / "run: 1.json"
    code, _, _ = call(capsys, "train", config_file, "max_steps=2", "--trace", str(trace))
    assert code == 0
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"step 1", "step 2", "forward layers.0"} <= names
