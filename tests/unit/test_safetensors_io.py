"""Files that this writer writes are files that the library reads."""

import resource

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from headrace.errors import CheckpointError
from headrace.store.safetensors_io import SafetensorsReader, tensor_names, write_file

TENSORS = {
    "a.weight": torch.randn(3, 5),
    "b": torch.randn(7).bfloat16(),
    "c": torch.arange(-3, 4, dtype=torch.int16),
    "empty": torch.empty(0, 4),
    "scalar": torch.tensor(1.5),
    "é∂": torch.ones(2),
}


def test_the_library_reads_what_was_written(tmp_path):
    path = tmp_path / "x.safetensors"
    write_file(path, TENSORS, {"format": "pt"})
    read = load_file(path)
    assert list(read) == sorted(TENSORS)
    for name, tensor in TENSORS.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_data_is_aligned(tmp_path):
    """The header is padded to 8 bytes, so that a reader may map the file."""
    for length in range(1, 10):
        path = tmp_path / f"{length}.safetensors"
        write_file(path, {"n" * length: torch.ones(3)}, {})
        assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0


def test_views_are_written_from_where_they_lie(tmp_path):
    flat = torch.arange(100.0)
    path = tmp_path / "x.safetensors"
    write_file(path, {"a": flat[10:22].view(3, 4), "b": flat[50:]}, {})
    read = load_file(path)
    assert torch.equal(read["a"], flat[10:22].view(3, 4))
    assert torch.equal(read["b"], flat[50:])


def test_reader_opens_each_file_once_and_closes_it(tmp_path):
    first, second = tmp_path / "1.safetensors", tmp_path / "2.safetensors"
    write_file(first, {"a": torch.ones(2), "b": torch.zeros(2)}, {})
    write_file(second, {"c": torch.full((2,), 2.0)}, {})
    assert sorted(tensor_names(first)) == ["a", "b"]
    with SafetensorsReader() as reader:
        assert reader.get(first, "a").tolist() == [1, 1]
        assert reader.get(second, "c").tolist() == [2, 2]
        assert reader.get(first, "b").tolist() == [0, 0]
        assert len(reader._open) == 2
        with pytest.raises(CheckpointError, match=r"1\.safetensors"):
            reader.get(first, "absent")


def test_disk_that_takes_no_more(tmp_path):
    """The system refuses bytes beyond a limit: an error that names the file and the size."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(CheckpointError, match=r"x\.safetensors: .*40000 bytes"):
            write_file(tmp_path / "x.safetensors", {"a": torch.ones(10_000)}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
