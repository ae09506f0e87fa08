"""Every row is in one part; stopped tokenising goes on; several processes give the same bytes."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict
from hypothesis import given
from hypothesis import strategies as st

from headrace.data import tokens as tokens_module
from headrace.data.files import resolve_files
from headrace.data.parts import Line, plan_parts, read_rows
from headrace.data.sources import DatasetSource
from headrace.data.tokens import tokenise
from headrace.errors import DataError, RankError


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def numbers(source, part_bytes=64):
    parts = plan_parts(source, part_bytes)
    return [row["n"] for part in parts for _, row in read_rows(part)], parts


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet", "arrow"])
def test_every_row_is_in_one_part(tmp_path, suffix):
    rows = [{"n": n, "text": "x" * (n % 7)} for n in range(50)]
    path = tmp_path / f"rows.{suffix}"
    table = pa.Table.from_pylist(rows)
    if suffix == "parquet":
        pq.write_table(table, path, row_group_size=7)
    elif suffix == "arrow":
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=7)
    elif suffix == "json":
        path.write_text(json.dumps(rows, indent=1))
    else:
        write(path, rows)
    found, parts = numbers(DatasetSource(path=str(path)))
    assert found == list(range(50))
    assert (len(parts) > 3) != (suffix == "json")
    for split, expected in (
        ("train[:20%]", range(10)),
        ("train[45:]", range(45, 50)),
        ("train[10:20]", range(10, 20)),
    ):
        assert numbers(DatasetSource(path=str(path), split=split))[0] == list(expected)
    few = DatasetSource(path=str(path), split="train[8:]", max_samples=5)
    assert numbers(few)[0] == list(range(8, 13))


@given(
    lines=st.lists(st.integers(0, 40), min_size=1, max_size=30),
    part_bytes=st.integers(1, 200),
    newline=st.booleans(),
)
def test_lines_are_cut_anywhere_and_keep_their_numbers(
    tmp_path_factory, lines, part_bytes, newline
):
    path = tmp_path_factory.mktemp("lines") / "rows.jsonl"
    text = "\n".join(json.dumps({"n": n, "pad": "é" * pad}) for n, pad in enumerate(lines))
    path.write_text(text + "\n" * newline, encoding="utf-8")
    parts = plan_parts(DatasetSource(path=str(path)), part_bytes)
    found = [(str(place), row["n"]) for part in parts for place, row in read_rows(part)]
    assert found == [(f"{path}:{n + 1}", n) for n in range(len(lines))]
    assert str(Line(str(path), 0)) == f"{path}:1"


def test_datasets_saved_on_disk_are_read(tmp_path, tokenizer, sentences):
    whole = Dataset.from_dict({"text": sentences})
    DatasetDict({"train": whole.select(range(6)), "test": whole.select([6, 7])}).save_to_disk(
        tmp_path / "both"
    )
    whole.save_to_disk(tmp_path / "one", num_shards=3)
    one = tokenise(DatasetSource(path=str(tmp_path / "one")), tokenizer, cache_dir=tmp_path / "c")
    assert one.num_documents == 8
    eos = tokenizer.eos_token
    assert tokenizer.decode(one.tokens[: one.offsets[1]]) == sentences[0] + eos
    test = DatasetSource(path=str(tmp_path / "both"), split="test")
    assert tokenise(test, tokenizer, cache_dir=tmp_path / "c").num_documents == 2
    with pytest.raises(DataError, match="has the splits train, test, and none is chosen") as caught:
        resolve_files(str(tmp_path / "both"))
    assert caught.value.remedy == "split: train"


def test_splits_are_told_by_the_names_of_files(tmp_path):
    for name in ("data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl",
                 "data/test-00000-of-00001.jsonl", "dataset_infos.json"):  # fmt: skip
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write(tmp_path / name, [{"n": 0}])
    assert len(resolve_files(str(tmp_path))) == 3
    assert len(resolve_files(str(tmp_path), "train[:10%]")) == 2
    with pytest.raises(DataError, match="no split 'validation'"):
        resolve_files(str(tmp_path), "validation")
    with pytest.raises(DataError, match="is not understood"):
        resolve_files(str(tmp_path), "train[1:2")
    (tmp_path / "plain").mkdir()
    write(tmp_path / "plain" / "rows.json", [{"n": 0}])
    (tmp_path / "plain" / "config.json").write_text("{}")
    assert [f.name for f in resolve_files(str(tmp_path / "plain"), "train")] == ["rows.json"]


def test_a_split_that_one_file_does_not_hold_is_refused(tmp_path):
    """Reading all of it would train on what was meant to be kept apart, or the other way round."""
    rows = write(tmp_path / "rows.jsonl", [{"n": 0}])
    for split in (None, "train", "train[:50%]"):
        assert resolve_files(str(rows), split) == [rows]
    with pytest.raises(DataError, match="no split 'test'"):
        resolve_files(str(rows), "test[:10%]")
    held_out = write(tmp_path / "my-test.jsonl", [{"n": 0}])
    assert resolve_files(str(held_out), "test") == [held_out]
    assert resolve_files(str(held_out), "train") == [held_out]
    (tmp_path / "test").mkdir()
    inside = write(tmp_path / "test" / "rows.jsonl", [{"n": 0}])
    assert resolve_files(str(inside), "test") == [inside]
    Dataset.from_dict({"n": [0]}).save_to_disk(tmp_path / "one")
    assert len(resolve_files(str(tmp_path / "one"), "train")) == 1
    with pytest.raises(DataError, match="no split 'test': save_to_disk wrote it as one"):
        resolve_files(str(tmp_path / "one"), "test")


def stored(store):
    return {p.name: p.read_bytes() for p in store.folder.glob("*.bin")}


def test_several_processes_write_the_same_bytes(tmp_path, tokenizer, sentences, monkeypatch):
    source = DatasetSource(path=str(write(tmp_path / "a.jsonl", [{"text": t} for t in sentences])))
    monkeypatch.setattr(
        tokens_module, "plan_parts", lambda source: plan_parts(source, part_bytes=200)
    )
    one = tokenise(source, tokenizer, cache_dir=tmp_path / "one", num_workers=0)
    two = tokenise(source, tokenizer, cache_dir=tmp_path / "two", num_workers=2)
    assert len(plan_parts(source, part_bytes=200)) > 2
    assert stored(one) == stored(two)
    assert one.key == two.key
    bad = write(tmp_path / "a.jsonl", [*({"text": t} for t in sentences), {"text": 7}])
    with pytest.raises(DataError, match=rf"{bad}:9: 'text' is int"):
        tokenise(source, tokenizer, cache_dir=tmp_path / "two", num_workers=2)


def a_worker_died():
    from concurrent.futures.process import BrokenProcessPool  # noqa: PLC0415 - one test

    raise DataError("died") from BrokenProcessPool()


def another_rank_failed():
    raise RankError("rank 1 died")


@pytest.mark.parametrize("end", [a_worker_died, another_rank_failed])
def test_what_dies_elsewhere_keeps_the_parts(tmp_path, tokenizer, sentences, monkeypatch, end):
    source = DatasetSource(path=str(write(tmp_path / "a.jsonl", [{"text": t} for t in sentences])))
    monkeypatch.setattr(
        tokens_module, "plan_parts", lambda source: plan_parts(source, part_bytes=200)
    )
    real = tokens_module.encode_parts

    def killed(parts, source, tokenizer, num_workers):
        yield from list(real(parts[:2], source, tokenizer, 0))
        end()

    with monkeypatch.context() as patched:
        patched.setattr(tokens_module, "encode_parts", killed)
        with pytest.raises((DataError, RankError), match="died"):
            tokenise(source, tokenizer, cache_dir=tmp_path / "cache")
    begun = []

    def counted(parts, *others):
        begun.append(len(parts))
        return real(parts, *others)

    monkeypatch.setattr(tokens_module, "encode_parts", counted)
    store = tokenise(source, tokenizer, cache_dir=tmp_path / "cache")
    assert begun == [len(plan_parts(source, part_bytes=200)) - 2]
    assert stored(store) == stored(tokenise(source, tokenizer, cache_dir=tmp_path / "other"))


class Interrupted:
    """Raises Ctrl-C at the n-th call of a method, before or after it is done."""

    def __init__(self, method, calls, *, after=False):
        self.method, self.left, self.after = method, calls, after

    def __get__(self, writer, _kind):
        def call(*arguments):
            self.left -= 1
            if self.left == 0 and not self.after:
                raise KeyboardInterrupt
            self.method(writer, *arguments)
            if self.left == 0:
                raise KeyboardInterrupt

        return call


@pytest.mark.parametrize(
    ("method", "calls", "after"),
    [("append", 4, False), ("append", 4, True), ("part_done", 2, False), ("close", 1, True)],
    ids=["before a chunk", "within a part", "behind its last chunk", "at the end"],
)
def test_a_stop_at_any_moment_neither_loses_nor_repeats_a_row(
    tmp_path, monkeypatch, method, calls, after
):
    """Parts of two chunks each; what a stop keeps is gone on with."""
    rows = [{"input_ids": [n, n + 1]} for n in range(40)]
    source = DatasetSource(path=str(write(tmp_path / "a.jsonl", rows)), type="tokens")
    monkeypatch.setattr(
        tokens_module, "plan_parts", lambda source: plan_parts(source, part_bytes=200)
    )
    monkeypatch.setattr("headrace.data.formats.CHUNK_ROWS", 4)
    writer = tokens_module.StoreWriter
    with monkeypatch.context() as patched:
        patched.setattr(writer, method, Interrupted(getattr(writer, method), calls, after=after))
        with pytest.raises(KeyboardInterrupt):
            tokenise(source, None, cache_dir=tmp_path / "cache")
    store = tokenise(source, None, cache_dir=tmp_path / "cache")
    assert store.tokens.tolist() == [i for row in rows for i in row["input_ids"]]
    assert store.num_documents == len(rows)


WORKERS = """
import sys
from headrace.data.parts import plan_parts
from headrace.data.sources import DatasetSource
from headrace.data.workers import encode_parts
if __name__ == "__main__":
    source = DatasetSource(path=sys.argv[1], type="tokens")
    chunks = encode_parts(plan_parts(source, part_bytes=50), source, None, 2)
    next(chunks)
    print("begun", flush=True)
    sys.stdin.read()
"""


def test_workers_end_with_the_process_that_asked_for_them(tmp_path):
    """Though it is killed: they hold its standard output, which ends with the last of them."""
    path = write(tmp_path / "a.jsonl", [{"input_ids": [n]} for n in range(40)])
    script = tmp_path / "script.py"
    script.write_text(WORKERS)
    with subprocess.Popen(
        [sys.executable, script, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout.readline() == "begun\n"
        child.kill()
        assert child.communicate(timeout=30)[0] == ""


CHILD = """
import pathlib, sys, time
from headrace.data import store_writer, tokens
from headrace.data.parts import plan_parts
from headrace.data.sources import DatasetSource
store_writer._SYNC_SECONDS = 0.0
tokens.plan_parts = lambda source: plan_parts(source, part_bytes=400)
done = store_writer.StoreWriter.part_done
def part_done(self):
    done(self)
    print(self.counts.parts, flush=True)
    time.sleep(0.05)
store_writer.StoreWriter.part_done = part_done
source = DatasetSource(path=sys.argv[1], type="tokens")
tokens.tokenise(source, None, cache_dir=pathlib.Path(sys.argv[2]))
"""


def test_a_killed_process_is_gone_on_with(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    rows = [{"input_ids": rng.integers(0, 99, 30).tolist()} for _ in range(80)]
    path = write(tmp_path / "a.jsonl", rows)
    cache = tmp_path / "cache"
    reached = 0
    for _ in range(3):
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(path), str(cache)], stdout=subprocess.PIPE, text=True
        )
        first = int(child.stdout.readline())
        assert first >= max(1, reached - 1)  # nothing that was durable is done again
        child.stdout.readline()
        reached = int(child.stdout.readline())
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        child.stdout.close()
        (left,) = (cache / "tokens").glob(".writing-*")
        with (left / "tokens.bin").open("ab") as file:
            file.write(b"\xff" * 13)  # what a kill may leave behind the journal
    monkeypatch.setattr(
        tokens_module, "plan_parts", lambda source: plan_parts(source, part_bytes=400)
    )
    source = DatasetSource(path=str(path), type="tokens")
    store = tokenise(source, None, cache_dir=cache)
    assert store.tokens.tolist() == [i for row in rows for i in row["input_ids"]]
    assert store.num_documents == 80
    assert not list((cache / "tokens").glob(".writing-*"))


def test_two_processes_that_want_one_store_make_it_once(tmp_path):
    rows = [{"input_ids": list(range(30))} for _ in range(40)]
    path = write(tmp_path / "a.jsonl", rows)
    children = [
        subprocess.Popen(
            [sys.executable, "-c", CHILD, str(path), str(tmp_path / "cache")],
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    lines = [child.communicate(timeout=100)[0].splitlines() for child in children]
    assert [child.returncode for child in children] == [0, 0]
    assert sorted(map(bool, lines)) == [False, True]


def test_what_a_writer_left_long_ago_is_removed(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"input_ids": [1, 2]}])
    old = tmp_path / "cache" / "tokens" / ".writing-old"
    old.mkdir(parents=True)
    os.utime(old, (time.time() - 30 * 86_400,) * 2)
    tokenise(DatasetSource(path=str(path), type="tokens"), None, cache_dir=tmp_path / "cache")
    assert not old.exists()


def test_a_dataset_in_the_local_hub_cache_is_found_by_its_name(tmp_path, monkeypatch):
    import huggingface_hub  # noqa: PLC0415 - what is replaced

    write(tmp_path / "train.jsonl", [{"n": 0}])

    def fetched(name, *, repo_type, local_files_only):
        assert (repo_type, local_files_only) == ("dataset", True)
        if name != "somebody/rows":
            raise huggingface_hub.errors.LocalEntryNotFoundError("not there")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetched)
    assert [f.name for f in resolve_files("somebody/rows", "train")] == ["train.jsonl"]
    with pytest.raises(DataError, match="local hub cache") as caught:
        resolve_files("nobody/rows")
    assert "hf download --repo-type dataset nobody/rows" in caught.value.remedy
    with pytest.raises(DataError, match="local hub cache") as caught:
        resolve_files("data/talks.jsonl")
    assert "hf download" not in caught.value.remedy


def test_rows_of_parquet_that_cannot_be_read_are_named(tmp_path, tokenizer):
    path = tmp_path / "rows.parquet"
    buffers = [None, pa.py_buffer(np.array([0, 3], np.int32)), pa.py_buffer(b"\xff\xfea")]
    column = pa.Array.from_buffers(pa.string(), 1, buffers)
    pq.write_table(pa.table({"prompt": column, "completion": ["x"]}), path)
    source = DatasetSource(path=str(path), type="prompt_completion")
    with pytest.raises(DataError, match="not UTF-8"):
        tokenise(source, tokenizer, cache_dir=tmp_path / "cache")
    twice = pa.Table.from_arrays([pa.array(["a"])] * 2, names=["prompt", "prompt"])
    pq.write_table(twice, path)
    with pytest.raises(DataError, match="2 columns named 'prompt'"):
        tokenise(source, tokenizer, cache_dir=tmp_path / "cache")
