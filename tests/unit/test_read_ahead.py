"""Reading ahead: what was named, in order, no further than the window, and never in the way."""

from __future__ import annotations

import os
import threading
import time
import tracemalloc

import pytest
import torch

from headrace.errors import CheckpointError
from headrace.store import read_ahead
from headrace.store.read_ahead import ReadAhead
from headrace.store.safetensors_io import SafetensorsReader, write_file


@pytest.fixture
def files(tmp_path):
    """Two files of four tensors of 4,000 bytes each."""
    paths = [tmp_path / "b.safetensors", tmp_path / "a.safetensors"]
    for number, path in enumerate(paths):
        tensors = {f"t{i}": torch.full((1000,), float(10 * number + i)) for i in range(4)}
        write_file(path, tensors, {})
    return paths


@pytest.fixture
def seen(monkeypatch):
    """Everything that is read, as bytes, in steps of 500; blocks of 1,500 and one thread."""
    blocks = []
    real = os.preadv

    def watched(descriptor, buffers, offset):
        size = real(descriptor, buffers, offset)
        blocks.append(bytes(buffers[0][:size]))
        return size

    monkeypatch.setattr(os, "preadv", watched)
    monkeypatch.setattr(read_ahead, "_BLOCK", 1500)
    monkeypatch.setattr(read_ahead, "_STEP", 500)
    monkeypatch.setattr(read_ahead, "_THREADS", 1)
    return blocks


def wait_for(blocks, count):
    limit = time.monotonic() + 20
    while len(blocks) < count and time.monotonic() < limit:
        time.sleep(0.005)


def data(*values):
    return b"".join(torch.full((1000,), float(value)).numpy().tobytes() for value in values)


def test_tensors_are_read_in_the_order_in_which_they_are_wanted(files, seen):
    wanted = [(files[1], "t3"), (files[0], "t0"), (files[1], "t1")]
    ahead = ReadAhead(wanted)
    wait_for(seen, 24)
    ahead.close()
    assert b"".join(seen) == data(13, 0, 11)


def test_reading_stays_within_the_window(files, seen):
    everything = data(0, 1, 2, 3)  # side by side: blocks do not end with tensors
    ahead = ReadAhead([(files[0], f"t{i}") for i in range(4)], window=4000)
    wait_for(seen, 9)
    time.sleep(0.1)
    assert b"".join(seen) == everything[:4500]  # the next block would begin beyond
    ahead.reached(files[0], "t1")
    wait_for(seen, 24)
    time.sleep(0.1)
    assert b"".join(seen) == everything[:12000]
    ahead.reached(files[0], "t0")  # again, out of turn: nothing is given back
    ahead.reached(files[0], "t3")
    wait_for(seen, 32)
    ahead.close()
    assert b"".join(seen) == everything


def test_closing_ends_threads_that_wait(files):
    before = threading.active_count()
    ahead = ReadAhead([(files[0], f"t{i}") for i in range(4)], window=1)
    ahead.close()
    assert threading.active_count() == before


def test_what_cannot_be_read_is_left_to_its_reader(files, tmp_path, seen):
    missing = tmp_path / "missing.safetensors"
    ahead = ReadAhead([(missing, "t0"), (files[0], "no such tensor"), (files[0], "t2")])
    wait_for(seen, 8)
    ahead.close()
    assert b"".join(seen) == data(2)


HEADERS = [
    b"[]",
    b"1",
    b"[" * 100_000,
    b"\xff",
    b'{"t0": 1}',
    b'{"t0": {}}',
    b'{"t0": {"data_offsets": [0]}}',
    b'{"t0": {"data_offsets": [0, "4"]}}',
    b'{"t0": {"data_offsets": [0, 1.5]}}',
    b'{"t0": {"data_offsets": [0, 1152921504606846976]}}',
    b'{"t0": {"data_offsets": [-1000, 4]}}',
    b'{"t0": {"data_offsets": [9, 2]}}',
]


@pytest.mark.parametrize("header", HEADERS, ids=lambda header: header[:60].decode("latin1"))
def test_a_file_that_was_replaced_is_left_to_its_reader(files, seen, header):
    """Who has it open still reads the old one; what is there now may be anything."""
    replaced = files[0].with_name("replaced.safetensors")
    replaced.write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    ahead = ReadAhead([(replaced, "t0"), (files[0], "t2")])
    wait_for(seen, 8)
    ahead.close()
    assert b"".join(seen)[-4000:] == data(2)
    assert len(b"".join(seen)) <= 4016


@pytest.mark.parametrize("length", [1 << 34, 1 << 63])
def test_a_header_longer_than_its_file_takes_no_memory(files, seen, length):
    replaced = files[0].with_name("replaced.safetensors")
    replaced.write_bytes(length.to_bytes(8, "little"))
    tracemalloc.start()
    ReadAhead([(replaced, "t0")]).close()
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


@pytest.mark.parametrize("started", [0, 1])
def test_threads_that_cannot_be_started_are_done_without(files, monkeypatch, started):
    before, start, calls = threading.active_count(), threading.Thread.start, []

    def refused(thread):
        calls.append(thread)
        if len(calls) > started:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)
    wanted = [(path, f"t{i}") for path in files for i in range(4)]
    with SafetensorsReader() as reader:
        reader.read_ahead(wanted)
        values = [float(reader.get(path, name)[7]) for path, name in wanted]
    assert values == [0, 1, 2, 3, 10, 11, 12, 13]
    assert len(calls) == started + 1
    assert threading.active_count() == before


def test_a_reader_gives_what_it_gives_without(files):
    wanted = [(path, f"t{i}") for path in files for i in range(4)]
    with SafetensorsReader() as reader:
        reader.read_ahead(wanted)
        values = [float(reader.get(path, name)[7]) for path, name in wanted]
    assert values == [0, 1, 2, 3, 10, 11, 12, 13]


def test_a_file_that_is_not_whole_is_named(files):
    os.truncate(files[1], files[1].stat().st_size - 1)
    with SafetensorsReader() as reader, pytest.raises(CheckpointError, match=r"a\.safetensors"):
        reader.read_ahead([(files[1], "t0")])
