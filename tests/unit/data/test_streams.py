"""Streams: what comes is a function of the cursor, shares are of tokens, nothing is kept."""

import itertools
import json
import threading

import pytest
import torch

from headrace.data import streams as streams_module
from headrace.data.batching import LoaderSettings
from headrace.data.files import resolve_files
from headrace.data.packing import RowSettings
from headrace.data.parts import plan_parts
from headrace.data.sampler import LoaderState
from headrace.data.sources import DatasetSource
from headrace.data.stream_loader import StreamLoader
from headrace.data.streams import Cursor, StreamedSet
from headrace.errors import ConfigError, DataError


@pytest.fixture
def make_stream(tmp_path, monkeypatch):
    """Streams of given document lengths in parts of a few documents; ids name their place."""
    monkeypatch.setattr(streams_module, "plan_parts", lambda source: plan_parts(source, 200))
    count, opened = itertools.count(), []

    def make(lengths, *, weight=None, shuffle=True, seed=0, vocab_size=10_000, **settings):
        number = next(count)
        path = tmp_path / f"{number}.jsonl"
        ids = itertools.count(100)
        rows = [{"input_ids": [next(ids) for _ in range(n)]} for n in lengths]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        stream = StreamedSet(
            DatasetSource(path=str(path), type="tokens", streaming=True, weight=weight),
            None,
            RowSettings(**{"max_length": 16, **settings}),
            vocab_size=vocab_size,
            seed=seed,
            number=len(opened),
            shuffle=shuffle,
        )
        opened.append(stream)
        return stream

    yield make
    for stream in opened:
        stream.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("headrace-stream")]


def tokens(step):
    return [batch.input_ids_BT.tolist() for batch in step.micro_batches]


def take(loader, num_steps):
    return [loader.next_step() for _ in range(num_steps)]


def test_a_resumed_stream_goes_on_with_the_next_row(make_stream):
    def loader(state=None):
        streams = [make_stream([9, 3, 14, 30] * 8, weight=0.7), make_stream([5] * 40, weight=0.3)]
        for number, stream in enumerate(streams):
            stream._seed = (0, "stream", number)
        return StreamLoader(
            streams, LoaderSettings(micro_batch_size=2, accumulation=2), seed=0, state=state
        )

    whole = take(loader(), 30)
    for stop in (1, 7, 19):
        state = LoaderState(**json.loads(json.dumps(vars(whole[stop - 1].state))))
        assert state.index == 4 * stop
        rest = take(loader(state), 30 - stop)
        assert list(map(tokens, rest)) == list(map(tokens, whole[stop:]))
        assert loader().state_after(stop) == state


def test_a_pass_predicts_every_token_once_and_the_next_is_in_another_order(make_stream):
    lengths = [9, 3, 14, 30, 2] * 6
    stream = make_stream(lengths)
    assert len(stream.parts) > 5
    cursor, passes = Cursor(), [[], []]
    while cursor.passes < 2:
        rows, row, following = stream.take(cursor)
        if following.passes == 2:
            break
        pieces = range(rows.plan.row_offsets[row], rows.plan.row_offsets[row + 1])
        for piece in pieces:
            targets = rows.supervise(piece)[1]
            passes[following.passes] += targets[targets >= 0].tolist()
        cursor = following
    firsts = {100 + sum(lengths[:n]) for n in range(len(lengths))}
    everything = sorted(set(range(100, 100 + sum(lengths))) - firsts)
    assert sorted(passes[0]) == everything
    assert sorted(passes[1]) == everything
    assert passes[0] != passes[1]


def test_shares_are_of_tokens(make_stream):
    streams = [make_stream([4] * 50, weight=3), make_stream([16] * 50, weight=1)]
    loader = StreamLoader(streams, LoaderSettings(micro_batch_size=4), seed=0)
    take(loader, 40)
    one, two = (Cursor(*cursor).tokens for cursor in loader.state.cursors)
    assert one / (one + two) == pytest.approx(0.75, abs=0.02)
    assert loader.epoch > 0
    assert [fact["streamed"] for fact in loader.facts()] == [True, True]


def test_an_unshuffled_stream_keeps_the_order_of_the_file(make_stream):
    stream = make_stream([4] * 30, shuffle=False, max_length=4)
    loader = StreamLoader([stream], LoaderSettings(micro_batch_size=1), seed=0, shuffle=False)
    flat = torch.cat([b.input_ids_BT.flatten() for s in take(loader, 35) for b in s.micro_batches])
    assert flat.tolist() == [100 + n % 120 for n in range(140)]


def test_ranks_share_a_step(make_stream):
    def steps(rank, num_ranks):
        stream = make_stream([9, 3, 14] * 8)
        stream._seed = (0, "stream", 0)
        settings = LoaderSettings(
            micro_batch_size=1, accumulation=4 // num_ranks, num_ranks=num_ranks
        )
        return take(StreamLoader([stream], settings, seed=0, rank=rank), 5)

    whole = steps(0, 1)
    halves = zip(steps(0, 2), steps(1, 2), strict=True)
    for step, (one, two) in zip(whole, halves, strict=True):
        merged = [t for pair in zip(tokens(one), tokens(two), strict=True) for t in pair]
        assert merged == tokens(step)
        assert one.state == two.state == step.state


def test_what_cannot_be_streamed_is_refused(make_stream, tmp_path):
    with pytest.raises(ConfigError, match="2 datasets are streamed, with the weights"):
        StreamLoader(
            [make_stream([4] * 3), make_stream([4] * 3, weight=1)],
            LoaderSettings(micro_batch_size=1),
            seed=0,
        )
    nothing = make_stream([1] * 60)
    with pytest.raises(DataError, match=f"no document to learn from in {len(nothing.parts)} parts"):
        nothing.take(Cursor())
    with pytest.raises(DataError, match="past the model's vocabulary of 50"):
        make_stream([5] * 3, vocab_size=50).take(Cursor())
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(DataError, match="is empty"):
        StreamedSet(
            DatasetSource(path=str(tmp_path / "empty.jsonl"), type="tokens"), None,
            RowSettings(max_length=8), vocab_size=9, seed=0,
        )  # fmt: skip


def test_the_fingerprint_follows_the_files_and_the_keys(make_stream, tmp_path):
    stream = make_stream([5] * 3)
    before = stream.fingerprint()
    assert before == stream.fingerprint()
    path = tmp_path / "0.jsonl"
    path.write_text(path.read_text().replace("101", "102"))
    assert stream.fingerprint() != before


def test_streamed_rows_that_supervise_nothing_are_left_out(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [
        {"input_ids": list(range(24)), "labels": [-100] * 22 + [22, 23]},
        {"input_ids": list(range(8)), "labels": [-100] * 7 + [7]},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = DatasetSource(path=str(path), type="tokens", streaming=True)
    stream = StreamedSet(
        source, None, RowSettings(max_length=8, packing=False), vocab_size=99, seed=0
    )
    cursor = Cursor()
    for _ in range(4):
        found, row, cursor = stream.take(cursor)
        _, targets = found.supervise(int(found.plan.row_offsets[row]))
        assert (targets >= 0).any()
    stream.close()


@pytest.mark.parametrize(
    ("path", "remedy"),
    [
        ("HuggingFaceFW/fineweb", "hf download --repo-type dataset HuggingFaceFW/fineweb"),
        ("hf://datasets/a/b/data/*.parquet", "dataset a/b --include 'data/*.parquet', and give"),
        ("https://hub.example/datasets/a/b/resolve/main/c.parquet", "a/b --include 'c.parquet'"),
        ("https://hub.example/datasets/a/b", "dataset a/b, and give path: a/b"),
        ("s3://bucket/key.jsonl", "fetch it first"),
        ("https://example.com/rows.jsonl", "fetch it first"),
    ],
)
def test_what_is_not_on_this_machine_is_refused_with_the_way_to_bring_it(path, remedy):
    """Streams too: a network is never read while training."""
    with pytest.raises(DataError) as caught:
        resolve_files(path)
    assert remedy in caught.value.remedy
