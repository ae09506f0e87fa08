"""Which files a path means, and which rows are refused, each by its place."""

import gzip
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.data.files import resolve_files
from headrace.data.formats import RowEncoder, _text
from headrace.data.parquet import parquet_texts
from headrace.data.parts import plan_parts, read_rows
from headrace.data.sources import DatasetSource
from headrace.errors import DataError


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def texts(path, field="text"):
    found = []
    for part in plan_parts(DatasetSource(path=str(path))):
        if part.format == ".parquet":
            found += [text for chunk, _ in parquet_texts(part, field) for text in chunk]
        else:
            found += [_text(place, row, field) for place, row in read_rows(part)]
    return found


def token_rows(path):
    source = DatasetSource(path=str(path), type="tokens")
    encoder = RowEncoder(source, None)
    rows = []
    for chunk in (chunk for part in plan_parts(source) for chunk in encoder.encode(part)):
        cuts = np.cumsum(chunk.lengths)[:-1]
        ids = np.split(chunk.input_ids, cuts)
        labels = [None] * len(ids) if chunk.labels is None else np.split(chunk.labels, cuts)
        rows += [
            (i.tolist(), None if k is None else k.tolist())
            for i, k in zip(ids, labels, strict=True)
        ]
    return rows


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path):
    (tmp_path / "sub").mkdir()
    write_jsonl(tmp_path / "sub" / "c.jsonl", [{"text": "third"}])
    write_jsonl(tmp_path / "b.jsonl", [{"text": "second"}])
    pq.write_table(pa.table({"text": ["first"]}), tmp_path / "a.parquet")
    with gzip.open(tmp_path / "z.jsonl.gz", "wt") as file:
        file.write('{"text": "last"}\n\n')
    (tmp_path / "README.md").write_text("not data")
    (tmp_path / ".hidden.jsonl").write_text("not data")
    assert texts(tmp_path) == ["first", "second", "third", "last"]
    assert texts(tmp_path / "*.jsonl") == ["second"]
    assert texts(tmp_path / "**" / "*.jsonl") == ["second", "third"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: p / "absent.jsonl", "does not exist"),
        (lambda _: "", "empty path"),
        (lambda _: "~nobody-of-this-name/a.jsonl", "home"),
        (lambda p: p / "*.parquet", "holds no data files"),
        (lambda p: p, "holds no data files"),
        (lambda p: (p / "x.csv").write_text("a") and p / "x.csv", "no readable format"),
        (lambda p: p / ("a" * 300), "cannot be listed"),
        (lambda p: (p / "dataset_dict.json").write_text("{") and p, "not a whole dataset"),
        (lambda p: (p / "dataset_dict.json").write_text("[1]") and p, "not a whole dataset"),
    ],
)
def test_missing_data_is_an_error_with_a_remedy(tmp_path, make, message):
    with pytest.raises(DataError, match=message) as caught:
        resolve_files(str(make(tmp_path)))
    assert caught.value.exit_code == 2
    assert caught.value.remedy


def test_a_folder_that_may_not_be_looked_into_is_named(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_text("{}")

    def denied(self):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "is_file", denied)
    with pytest.raises(DataError, match=r"cannot be listed: .*Permission denied"):
        resolve_files(str(tmp_path))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{broken", "not a JSON object"),
        ("[1, 2]", "a list, not a JSON object"),
        ('{"body": "x"}', "no 'text'.*has 'body'"),
        ('{"text": null}', "'text' is NoneType"),
        ('{"text": 7}', "'text' is int"),
        (b'{"text": "\xff"}', "not a JSON object"),
        ("\0\0\0", "not a JSON object"),
        ('{"text": ' + "1" * 5000 + "}", "not a JSON object"),
        ('{"text": ' + "[" * 200_000, "not a JSON object"),
        ('{"text": "a \\ud800 b"}', r"half a character, \\ud800"),
    ],
)
def test_a_bad_text_row_is_named_by_file_and_line(tmp_path, line, message):
    file = tmp_path / "rows.jsonl"
    bad = line if isinstance(line, bytes) else line.encode()
    file.write_bytes(b'{"text": "good"}\n\n' + bad + b"\n")
    with pytest.raises(DataError, match=message) as caught:
        texts(file)
    assert f"{file}:3:" in str(caught.value)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, "no 'input_ids'"),
        ({"input_ids": [1, 2.5]}, "not a flat list of integers"),
        ({"input_ids": [[1], [2]]}, "not a flat list of integers"),
        ({"input_ids": [[1], [2, 3]]}, "not a flat list"),
        ({"input_ids": "abc"}, "not a flat list of integers"),
        ({"input_ids": [1, -1]}, r"input_ids\[1\] = -1"),
        ({"input_ids": [2**31]}, "no token id"),
        ({"input_ids": [1, 2], "labels": [1]}, "1 labels for 2 input_ids"),
        ({"input_ids": [1, 2], "labels": [1, -5]}, "label -5"),
    ],
)
def test_a_bad_tokens_row_is_named_by_file_and_line(tmp_path, row, message):
    file = write_jsonl(tmp_path / "rows.jsonl", [{"input_ids": [3]}, row])
    with pytest.raises(DataError, match=message) as caught:
        token_rows(file)
    assert f"{file}:2:" in str(caught.value)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"ids": [[1]]}, "no column 'input_ids'"),
        ({"input_ids": ["a"]}, "not lists of integers"),
        ({"input_ids": [[1], None]}, "row 1: 'input_ids' is null"),
        ({"input_ids": [[1], [2, None]]}, "row 1: input_ids holds"),
        ({"input_ids": [[1], [], [5, -2]]}, "row 2: input_ids holds -2"),
        ({"input_ids": [[1], [2, 3]], "labels": [[1], [2]]}, "row 1: 1 labels for 2"),
        ({"input_ids": [[1]], "labels": [[-3]]}, "label -3"),
    ],
)
def test_a_bad_parquet_row_is_named(tmp_path, table, message):
    file = tmp_path / "rows.parquet"
    pq.write_table(pa.table(table), file)
    with pytest.raises(DataError, match=message) as caught:
        token_rows(file)
    assert str(file) in str(caught.value)


def test_parquet_text_is_checked(tmp_path):
    file = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"text": ["a", None]}), file)
    with pytest.raises(DataError, match="row 1: 'text' is null"):
        texts(file)
    pq.write_table(pa.table({"text": [1, 2]}), file)
    with pytest.raises(DataError, match="is int64, not text"):
        texts(file)
    file.write_bytes(b"PAR1 but not really")
    with pytest.raises(DataError, match="cannot be read as Parquet"):
        texts(file)


def test_formats_agree(tmp_path):
    rows = [{"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}, {"input_ids": [4], "labels": [4]}]
    write_jsonl(tmp_path / "a.jsonl", rows)
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    for kind in (pa.list_(pa.int32()), pa.large_list(pa.int64())):
        arrays = {name: pa.array(column, kind) for name, column in columns.items()}
        pq.write_table(pa.table(arrays), tmp_path / "a.parquet")
        assert token_rows(tmp_path / "a.parquet") == token_rows(tmp_path / "a.jsonl")


def test_a_truncated_gzip_names_the_line(tmp_path):
    whole = gzip.compress(b"".join(b'{"text": "%d"}\n' % i for i in range(5000)))
    file = tmp_path / "rows.jsonl.gz"
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"rows.jsonl.gz:\d+: the compressed file breaks off"):
        texts(file)


def test_a_damaged_gzip_names_the_line(tmp_path):
    file = tmp_path / "rows.jsonl.gz"
    packed = bytearray(gzip.compress(b'{"text": "good"}\n' * 2000))
    packed[30:42] = b"\xff\x00\xff" * 4
    file.write_bytes(packed)
    with pytest.raises(DataError, match="the compressed file breaks off"):
        texts(file)


def test_a_damaged_parquet_file_is_named(tmp_path):
    file = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"text": [f"document {k}" for k in range(5000)]}), file)
    whole = file.read_bytes()
    for place in (10, 200, 2000, len(whole) // 2):
        file.write_bytes(whole[:place] + b"\xff" * 40 + whole[place + 40 :])
        with pytest.raises(DataError, match="cannot be read as Parquet"):
            texts(file)


def test_parquet_text_that_is_not_utf8_names_the_file(tmp_path):
    file = tmp_path / "rows.parquet"
    buffers = [None, pa.py_buffer(np.array([0, 3], np.int32)), pa.py_buffer(b"\xff\xfea")]
    pq.write_table(pa.table({"text": pa.Array.from_buffers(pa.string(), 1, buffers)}), file)
    with pytest.raises(DataError, match="not UTF-8"):
        texts(file)


def test_a_parquet_column_given_twice_is_refused(tmp_path):
    file = tmp_path / "rows.parquet"
    columns = [pa.array(["a"]), pa.array(["b"])]
    pq.write_table(pa.Table.from_arrays(columns, names=["text", "text"]), file)
    with pytest.raises(DataError, match="2 columns named 'text'"):
        texts(file)


def test_every_kind_of_parquet_text_is_read(tmp_path):
    file = tmp_path / "rows.parquet"
    for kind in (pa.string(), pa.large_string(), pa.string_view()):
        pq.write_table(pa.table({"text": pa.array(["one", "two"], kind)}), file)
        assert texts(file) == ["one", "two"]
