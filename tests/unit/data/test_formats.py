"""What rows of each type become, and which are refused."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.data.formats import RowEncoder
from headrace.data.parts import plan_parts
from headrace.data.rows import UNDATED, month_name
from headrace.data.sources import DatasetSource
from headrace.data.templates import TEMPLATES
from headrace.data.tokens import tokenise
from headrace.errors import ConfigError, DataError


@pytest.fixture
def encode(tmp_path, tokenizer):
    """Encodes rows; returns one (prompt, supervised) pair of texts a document."""

    def run(rows, **keys):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        source = DatasetSource(path=str(path), **keys)
        (part,) = plan_parts(source)
        (chunk,) = RowEncoder(source, tokenizer).encode(part)
        cuts = np.cumsum(chunk.lengths)[:-1]
        pairs = []
        for ids, labels in zip(
            np.split(chunk.input_ids, cuts), np.split(chunk.labels, cuts), strict=True
        ):
            known = labels >= 0
            assert (labels[known] == ids[known]).all()
            pairs.append((tokenizer.decode(ids[~known]), tokenizer.decode(ids[known])))
        return pairs

    return run


def test_a_completion_is_supervised_and_its_prompt_is_not(encode):
    rows = [{"prompt": "The rate", "completion": " rose."}]
    assert encode(rows, type="prompt_completion") == [("The rate", " rose.<eos>")]
    everything = encode(rows, type="prompt_completion", train_on_inputs=True)
    assert everything == [("", "The rate rose.<eos>")]
    named = {"field_prompt": "q", "field_completion": "a"}
    assert encode([{"q": "x", "a": "y"}], type="prompt_completion", **named) == [("x", "y<eos>")]


def test_a_prompt_of_messages_goes_through_the_template(encode, tokenizer):
    tokenizer.chat_template = TEMPLATES["mistral"]
    rows = [
        {
            "prompt": [{"role": "user", "content": "The rate?"}],
            "completion": [{"role": "assistant", "content": "It rose."}],
        }
    ]
    ((prompt, answer),) = encode(rows, type="prompt_completion")
    assert "The rate?" in prompt
    assert answer == " It rose.<eos>"


def test_alpaca_rows_become_its_prompt(encode):
    rows = [
        {"instruction": "Add {input}.", "input": "1 and 2", "output": "3"},
        {"instruction": "Say yes.", "input": "", "output": "yes"},
    ]
    (first, answer), (second, _) = encode(rows, type="alpaca")
    assert answer == "3<eos>"
    # A brace in the data is data.
    assert "### Instruction:\nAdd {input}.\n\n### Input:\n1 and 2\n\n### Response:\n" in first
    assert "### Input" not in second
    keys = {"format": "Q {instruction} / {input} A", "system_prompt": "Hm."}
    pairs = encode(rows, type="alpaca", **keys, no_input_format="Q {instruction} A")
    assert [prompt for prompt, _ in pairs] == [
        "Hm.\n\nQ Add {input}. / 1 and 2 A",
        "Hm.\n\nQ Say yes. A",
    ]


def test_instructions_go_through_the_template(encode, tokenizer):
    tokenizer.chat_template = TEMPLATES["mistral"]
    row = {
        "instruction": "Add.", "input": "1 2", "output": "3", "about": "Be brief.",
        "before": [["Hello", "Good day"]],
    }  # fmt: skip
    keys = {"field_history": "before", "field_system": "about"}
    ((prompt, answer),) = encode([row], type="instruction", **keys)
    assert "Be brief." in prompt
    assert "Add.\n1 2" in prompt
    assert answer == " Good day<eos> 3<eos>"


def test_segments_are_taken_as_they_are(encode):
    segments = [
        {"text": "The rate", "label": False},
        {"text": " rose", "label": True},
        {"text": " and", "label": False},
        {"text": " fell<eos>", "label": True},
    ]
    pairs = encode([{"segments": segments}], type="segments")
    assert pairs == [("The rate and", " rose fell<eos>")]
    assert encode([{"s": segments[:2]}], type="segments", field_segments="s")


def test_rows_that_supervise_nothing_are_counted_and_left_out(tmp_path, tokenizer):
    path = tmp_path / "rows.jsonl"
    rows = [
        {"segments": [{"text": "a", "label": label}, {"text": "b", "label": label}]}
        for label in (True, False, True)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = DatasetSource(path=str(path), type="segments")
    store = tokenise(source, tokenizer, cache_dir=tmp_path / "cache")
    assert (store.num_documents, store.num_unsupervised) == (2, 1)
    path.write_text(json.dumps(rows[1]) + "\n")
    with pytest.raises(DataError, match="1 supervise nothing"):
        tokenise(source, tokenizer, cache_dir=tmp_path / "cache")


@pytest.mark.parametrize(
    ("keys", "row", "message"),
    [
        ({"type": "prompt_completion"}, {"prompt": "x"}, "no 'completion'"),
        ({"type": "prompt_completion"}, {"prompt": "x", "completion": 1}, "is int, not text"),
        ({"type": "alpaca"}, {"instruction": "x"}, "no 'output'"),
        ({"type": "alpaca"}, {"instruction": "x", "output": None}, "NoneType, not text"),
        ({"type": "segments"}, {"segments": []}, "no list of segments"),
        ({"type": "segments"}, {"segments": [{"text": "x"}]}, "'segments' holds"),
    ],
)
def test_an_unusable_row_is_named(encode, keys, row, message):
    with pytest.raises(DataError, match=message) as caught:
        encode([row], **keys)
    assert "rows.jsonl:1:" in str(caught.value)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("row", "remedy"),
    [
        ({"input_ids": [1, 2]}, "type: tokens if that is what its rows are, or text_field: of"),
        ({"conversations": "x"}, "type: messages if"),
        ({"body": "x"}, "set text_field: of this dataset"),
    ],
)
def test_columns_tell_which_type_was_forgotten(tmp_path, tokenizer, suffix, row, remedy):
    path = tmp_path / f"rows.{suffix}"
    if suffix == "jsonl":
        path.write_text(json.dumps(row) + "\n")
    else:
        pq.write_table(pa.table({name: [value] for name, value in row.items()}), path)
    source = DatasetSource(path=str(path))
    (part,) = plan_parts(source)
    with pytest.raises(DataError, match=r"has no .*'text'") as raised:
        list(RowEncoder(source, tokenizer).encode(part))
    assert remedy in str(raised.value.remedy)


def test_a_key_that_would_be_ignored_is_refused():
    with pytest.raises(ConfigError, match="roles_to_train has no effect on rows of type text"):
        DatasetSource(path="x", roles_to_train=["user"])
    with pytest.raises(ConfigError, match="max_samples is 0"):
        DatasetSource(path="x", max_samples=0)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("kind", ["text", "tokens"])
def test_the_month_of_a_document_is_kept(tmp_path, tokenizer, suffix, kind):
    dates = ["2016-03-31", "2016-03-01T12:00:00Z", None, "1999-12-31"]
    rows = [{"text": "a b", "input_ids": [1, 2], "at": date} for date in dates]
    path = tmp_path / f"rows.{suffix}"
    if suffix == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = DatasetSource(path=str(path), type=kind, date_field="at")
    store = tokenise(source, tokenizer, cache_dir=tmp_path / "cache")
    assert [month_name(m) for m in store.months] == ["2016-03", "2016-03", "undated", "1999-12"]
    assert store.months[2] == UNDATED
    with pytest.raises(DataError, match=r"no (column )?'when'"):
        tokenise(
            DatasetSource(path=str(path), type=kind, date_field="when"),
            tokenizer,
            cache_dir=tmp_path / "cache",
        )


def test_what_is_no_date_is_named(tmp_path, tokenizer):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "x", "at": "spring"}\n')
    with pytest.raises(DataError, match=r"rows.jsonl:1: 'at' is 'spring', which is no date"):
        tokenise(
            DatasetSource(path=str(path), date_field="at"), tokenizer, cache_dir=tmp_path / "c"
        )
