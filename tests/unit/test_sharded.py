"""Folders of torch.distributed.checkpoint: read as torch reads them, hostile ones refused."""

import enum
import io
import json
import os
import pickle
import shutil
import struct
import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from headrace.errors import CheckpointError
from headrace.store.plain_pickle import read_pickle
from headrace.store.sharded import ShardedCheckpoint


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with tensors of several types, an empty one, a scalar and an object."""
    folder = tmp_path_factory.mktemp("dcp") / "saved"
    values = {
        "model": {
            "a.weight": torch.arange(12, dtype=torch.float32).view(3, 4),
            "b": torch.arange(5).to(torch.bfloat16),
            "empty": torch.empty(0, 3),
            "scalar": torch.tensor(7, dtype=torch.int64),
        },
        "note": {"not": "a tensor"},
    }
    with pytest.warns(UserWarning, match="single process"):
        dcp.save(values, checkpoint_id=folder, no_dist=True)
    return folder, values


def test_members_of_enumerations_are_known_however_they_are_written(tmp_path, monkeypatch):
    """Python 3.11.2 writes them by their names, others by their values."""
    for name, reduce in (
        ("names", lambda member, _: (getattr, (type(member), member._name_))),
        ("values", lambda member, _: (type(member), (member._value_,))),
    ):
        monkeypatch.setattr(enum.Enum, "__reduce_ex__", reduce)
        with pytest.warns(UserWarning, match="single process"):
            dcp.save({"a": torch.arange(3.0)}, checkpoint_id=tmp_path / name, no_dist=True)
        content = (tmp_path / name / ".metadata").read_bytes()
        assert (b"getattr" in content) == (name == "names")
        assert list(ShardedCheckpoint(tmp_path / name).tensors) == ["a"]


@pytest.fixture
def folder(saved, tmp_path):
    """A copy to damage."""
    shutil.copytree(saved[0], tmp_path / "saved")
    return tmp_path / "saved"


def rewrite(folder, change):
    """Change the metadata as an attacker could, who can write any pickle."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def test_tensors_are_what_was_saved(saved):
    folder, values = saved
    found = ShardedCheckpoint(folder)
    assert {t.path for t in found.tensors.values()} == {("model", n) for n in values["model"]}
    for name, value in values["model"].items():
        read = found.read(f"model.{name}")
        assert read.dtype == value.dtype
        assert torch.equal(read, value)


class Runs:
    """Unpickling it runs a command."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


HOSTILE = {
    "a command": lambda path: pickle.dumps(Runs(path)),
    "a command by text": lambda path: b"cos\nsystem\n(S'touch %s'\ntR." % str(path).encode(),
    "an old-style call": lambda path: b"(S'touch %s'\nios\nsystem\n." % str(path).encode(),
    "eval": lambda path: pickle.dumps(eval),
    "an attribute of a known module": lambda _: b"\x80\x04\x8c\x05torch\x8c\x04load\x93.",
    "a dotted name": lambda _: b"\x80\x04\x8c\x05torch\x8c\x0aSize.mro()\x93.",
    "a persistent id": lambda _: b"\x80\x02K\x01Q.",
    "an extension code": lambda _: b"\x80\x02\x82\x01.",
    "a call of a value": lambda _: b"\x80\x02K\x01)R.",
    "a huge memo index": lambda _: b"\x80\x02K\x01r\xff\xff\xff\x7f.",
    "a huge string": lambda _: b"\x80\x04\x8d" + struct.pack("<Q", 1 << 60) + b"x.",
    "a huge frame": lambda _: b"\x80\x04\x95" + struct.pack("<Q", 1 << 60) + b"K\x01.",
    "an empty stack": lambda _: b"\x80\x020.",
    "two values": lambda _: b"\x80\x02K\x01K\x02.",
    "no end": lambda _: b"\x80\x02K\x01",
    "nothing": lambda _: b"",
    "no metadata": lambda _: pickle.dumps({"a": 1}),
    "an unhashable key": lambda _: b"\x80\x02}]K\x01s.",
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_metadata_runs_nothing(folder, tmp_path, kind):
    (folder / ".metadata").write_bytes(HOSTILE[kind](tmp_path / "ran"))
    with pytest.raises(CheckpointError):
        ShardedCheckpoint(folder)
    assert not (tmp_path / "ran").exists()


def test_hostile_piece_runs_nothing(folder, tmp_path):
    """The pieces are torch.save files, which hold a pickle too."""
    buffer = io.BytesIO()
    torch.save(Runs(tmp_path / "ran"), buffer)
    file = folder / "__0_0.distcp"
    file.write_bytes(file.read_bytes() + buffer.getvalue())

    def point_there(metadata):
        for index, info in metadata.storage_data.items():
            if index.fqn == "model.a.weight":
                info.offset, info.length = (
                    file.stat().st_size - len(buffer.getvalue()),
                    len(buffer.getvalue()),
                )

    rewrite(folder, point_there)
    with pytest.raises(CheckpointError, match="does not hold a plain tensor where model"):
        ShardedCheckpoint(folder).read("model.a.weight")
    assert not (tmp_path / "ran").exists()


def _outside(metadata):
    for info in metadata.storage_data.values():
        info.relative_path = "../secret"


def _far(metadata):
    for info in metadata.storage_data.values():
        info.offset = 1 << 50


def _large(metadata):
    entry = metadata.state_dict_metadata["model.a.weight"]
    entry.size = torch.Size([1 << 40, 4])
    entry.chunks[0].sizes = torch.Size([1 << 40, 4])


def _overlapping(metadata):
    entry = metadata.state_dict_metadata["model.a.weight"]
    half = ChunkStorageMetadata(offsets=torch.Size([0, 0]), sizes=torch.Size([3, 2]))
    entry.chunks = [half, half]


def _missing_rows(metadata):
    metadata.state_dict_metadata["model.a.weight"].chunks[0].sizes = torch.Size([2, 4])


def _compressed(metadata):
    for info in metadata.storage_data.values():
        info.transform_descriptors = ["zstd"]


def _negative(metadata):
    for info in metadata.storage_data.values():
        info.offset = -5


def _other_types(metadata):
    metadata.state_dict_metadata["model.a.weight"].chunks = [7]


def _other_shape(metadata):
    entry = metadata.state_dict_metadata["model.a.weight"]
    entry.size = torch.Size([4, 3])
    entry.chunks[0].sizes = torch.Size([4, 3])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_outside, "a file outside of it"),
        (_far, "ends before the data"),
        (_large, "does not fit"),
        (_overlapping, "hold 12 of 12 elements"),
        (_missing_rows, "hold 8 of 12 elements"),
        (_compressed, "compressed or encrypted"),
        (_negative, "ends before the data"),
        (_other_types, "another layout"),
        (_other_shape, "and should be"),
    ],
)
def test_metadata_that_does_not_fit_the_files(folder, change, message):
    rewrite(folder, change)
    with pytest.raises(CheckpointError, match=message):
        ShardedCheckpoint(folder).read("model.a.weight")


def test_damaged_files(folder):
    file = folder / "__0_0.distcp"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match="ends before the data"):
        ShardedCheckpoint(folder)
    file.write_bytes(b"\0" * len(whole))
    with pytest.raises(CheckpointError, match="does not hold a plain tensor"):
        ShardedCheckpoint(folder).read("model.b")
    file.unlink()
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp is missing"):
        ShardedCheckpoint(folder)


def test_every_truncation_of_the_metadata_is_refused(folder):
    whole = (folder / ".metadata").read_bytes()
    for length in range(0, len(whole), 7):
        (folder / ".metadata").write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            ShardedCheckpoint(folder)


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_changed_bytes_give_tensors_or_a_clean_error(folder, saved, data):
    changed = bytearray((saved[0] / ".metadata").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    (folder / ".metadata").write_bytes(bytes(changed))
    try:
        found = ShardedCheckpoint(folder)
        for name in found.tensors:
            found.read(name)
    except CheckpointError:
        pass


@given(data=st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data):
    try:
        read_pickle(data, {"torch.Size": "Size"}, "file")
    except CheckpointError as error:
        assert "file" in str(error)  # noqa: PT017 - bytes may be a pickle


MEMORY = """
import json, sys, warnings
from pathlib import Path

import torch
from torch.distributed import checkpoint as dcp
from transformers import AutoConfig, AutoModelForCausalLM

from headrace.trainer.convert import convert_to_model
from headrace.trainer.convert_state import convert_to_checkpoint


def make(folder, **sizes):
    config = AutoConfig.for_model(
        "llama", num_attention_heads=8, num_key_value_heads=8, vocab_size=4096,
        max_position_embeddings=64, tie_word_embeddings=False, **sizes,
    )
    weights = AutoModelForCausalLM.from_config(config, dtype=torch.float32).state_dict()
    state = {
        name: {"exp_avg": tensor, "exp_avg_sq": tensor, "step": torch.tensor(3.0)}
        for name, tensor in weights.items()
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that there is one process
        dcp.save({"model": weights}, checkpoint_id=folder / "pytorch_model_fsdp_0", no_dist=True)
        moments = {"optimizer": {"state": state}}
        dcp.save(moments, checkpoint_id=folder / "optimizer_0", no_dist=True)
    config.save_pretrained(folder)
    return sum(tensor.nbytes for tensor in weights.values())


def status(field):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024


def convert(source):
    convert_to_model(source, source / "model")
    convert_to_checkpoint(source, source / "run")


folder = Path(sys.argv[1])
if sys.argv[2] == "make":
    make(folder / "small", hidden_size=64, intermediate_size=64, num_hidden_layers=1)
    sizes = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 7}
    print(json.dumps(make(folder / "large", **sizes)))
else:
    convert(folder / "small")  # what is imported at the first use is not the model's
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    convert(folder / "large")
    print(json.dumps(status("VmHWM") - before))
"""


def test_converting_takes_the_memory_of_a_layer(tmp_path):
    """107 MB of weights, 320 of state; a layer has 13 MB of weights and 38 of state."""

    def run(part):
        done = subprocess.run(
            [sys.executable, "-c", MEMORY, tmp_path, part],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout)

    assert run("make") > 100e6
    layer = 4 * (4 * 512 * 512 + 3 * 512 * 1408)
    # The state of a layer, a tensor that is read, and what the allocator keeps.
    assert run("convert") < 3 * layer + 4 * 512 * 1408 + 16e6
