"""From rows to tokens and labels, by the type of a dataset.

Owns what each type makes of a row. The invariant: a row becomes a document or an error that
names it; what is left out (rows in which nothing is supervised, empty texts) is counted. Everything
here can be sent to another process. Chooses no files and keeps nothing.
"""

from __future__ import annotations

import re
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.batch import IGNORE_INDEX
from headrace.data.chat import ChatRenderer
from headrace.data.conversation import ConversationReader, instruction_columns, system_text
from headrace.data.parquet import CHUNK_ROWS, parquet_texts, parquet_tokens
from headrace.data.parts import read_rows
from headrace.data.rows import (
    Place,
    TokenChunk,
    bad_row,
    checked_ids,
    checked_labels,
    checked_text,
    month_of,
    name_the_column,
)
from headrace.data.sources import CHAT_TYPES, DatasetSource
from headrace.data.templates import resolve_template
from headrace.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import numpy.typing as npt

    from headrace.data.parts import Part

    Ids = npt.NDArray[np.int32]
    Row = tuple[Place, dict[str, Any]]

_BRACES = re.compile(r"\{(instruction|input|system)\}")
# The prompt of Stanford Alpaca (github.com/tatsu-lab/stanford_alpaca, "Data Release").
_ALPACA = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
_ALPACA_NO_INPUT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes "
    "the request.\n\n### Instruction:\n{instruction}\n\n### Response:\n"
)


class RowEncoder:
    """Encodes the parts of one dataset.

    Args:
        source: the dataset.
        tokenizer: a Hugging Face tokenizer; may be ``None`` for ``tokens`` rows.

    Raises:
        DataError: the tokenizer is missing, or lacks what the type needs.
        ConfigError: chat rows without a chat template.
    """

    def __init__(self, source: DatasetSource, tokenizer: Any) -> None:
        self.source = source
        self.tokenizer = tokenizer
        if source.type == "tokens":
            return
        if tokenizer is None:
            raise DataError(
                f"dataset {source.label!r} has type: {source.type} but there is no tokenizer",
                remedy="name one with tokenizer_name_or_path:, or give rows of type: tokens",
            )
        self._eos = require_eos(tokenizer, getattr(tokenizer, "name_or_path", "") or "this model")
        self._reader = ConversationReader(source)
        self._renderer: ChatRenderer | None = None
        if source.type in CHAT_TYPES:
            self._chat()

    def _chat(self) -> ChatRenderer:
        """The chat renderer; made for the first row that needs it."""
        if self._renderer is None:
            if not getattr(self.tokenizer, "is_fast", False):
                raise DataError(
                    f"dataset {self.source.label!r}: chat rows need a fast tokenizer, which knows "
                    "the characters of its tokens",
                    remedy="install tokenizers' version of it, or give rows of type: tokens",
                )
            self._renderer = ChatRenderer(
                self.tokenizer,
                resolve_template(self.source.chat_template, self.tokenizer),
                train_on_eos=self.source.train_on_eos,
                variables=self.source.chat_template_kwargs,
            )
        return self._renderer

    def encode(self, part: Part) -> Iterator[TokenChunk]:
        """Chunks of the documents of a part, in order.

        Raises:
            DataError: naming the first row that cannot be used.
        """
        source = self.source
        if part.format == ".parquet" and source.type == "tokens":
            yield from parquet_tokens(part, source.date_field)
        elif part.format == ".parquet" and source.type == "text":
            for texts, months in parquet_texts(part, source.text_field, source.date_field):
                yield self._text_chunk(texts, months)
        else:
            for rows in _grouped(read_rows(part)):
                months = self._months(rows)
                yield self._chunk(rows, months)

    def _chunk(self, rows: list[Row], months: Ids | None) -> TokenChunk:
        if self.source.type == "text":
            texts = [_text(place, row, self.source.text_field) for place, row in rows]
            return self._text_chunk(texts, months)
        if self.source.type == "tokens":
            return _token_chunk(rows, months)
        return _pack(self._documents(rows), months)

    def _documents(self, rows: list[Row]) -> list[tuple[Ids, Ids]]:
        kind = self.source.type
        if kind == "segments":
            return [self._segments(place, row) for place, row in rows]
        if kind == "alpaca":
            return [self._pair(*self._alpaca(place, row)) for place, row in rows]
        if kind == "prompt_completion" and isinstance(
            rows[0][1].get(self.source.field_prompt), str
        ):
            return [self._pair(*self._prompt(place, row)) for place, row in rows]
        return self._chat().encode([(place, self._reader.read(place, row)) for place, row in rows])

    def _text_chunk(self, texts: list[str], months: Ids | None) -> TokenChunk:
        encoded = self.tokenizer(
            texts, add_special_tokens=True, return_attention_mask=False, verbose=False
        )["input_ids"]
        # An empty text holds nothing to learn; a lone EOS would teach to end before beginning.
        kept = [bool(text and ids) for text, ids in zip(texts, encoded, strict=True)]
        rows = [
            ids if ids[-1] == self._eos else [*ids, self._eos]
            for ids, keep in zip(encoded, kept, strict=True)
            if keep
        ]
        return TokenChunk(
            input_ids=np.fromiter(chain.from_iterable(rows), np.int32),
            lengths=np.array([len(ids) for ids in rows], np.int64),
            labels=None,
            months=None if months is None else months[kept],
        )

    def _months(self, rows: list[Row]) -> Ids | None:
        column = self.source.date_field
        if column is None:
            return None
        for place, row in rows:
            if column not in row:
                raise bad_row(
                    place,
                    f"the row has no {column!r}",
                    "set date_field: of this dataset to the column of the date, or remove it",
                )
        return np.array([month_of(place, column, row[column]) for place, row in rows], np.int32)

    # -- prompt and answer -----------------------------------------------------------------

    def _prompt(self, place: Place, row: dict[str, Any]) -> tuple[str, str]:
        return (
            _text(place, row, self.source.field_prompt, "field_prompt"),
            _text(place, row, self.source.field_completion, "field_completion"),
        )

    def _alpaca(self, place: Place, row: dict[str, Any]) -> tuple[str, str]:
        source = self.source
        instruction, given, output = instruction_columns(place, row, source)
        system = system_text(place, row, source)
        with_input = source.format or _ALPACA
        shape = with_input if given else source.no_input_format or source.format or _ALPACA_NO_INPUT
        if system and "{system}" not in shape:
            shape = "{system}\n\n" + shape
        values = {"instruction": instruction, "input": given, "system": system or ""}
        # Not str.format: texts and formats may hold other braces.
        return _BRACES.sub(lambda name: values[name[1]], shape), output

    def _pair(self, prompt: str, answer: str) -> tuple[Ids, Ids]:
        """Tokens of a prompt and its answer, which ends with EOS and alone is supervised."""
        start = self.tokenizer(prompt, add_special_tokens=True, verbose=False)["input_ids"]
        if start and start[-1] == self._eos:
            start = start[:-1]
        # Apart, as at inference: the prompt's tokens must not depend on the answer.
        rest = self.tokenizer(answer, add_special_tokens=False, verbose=False)["input_ids"]
        if not rest or rest[-1] != self._eos:
            rest = [*rest, self._eos]
        ids = np.array([*start, *rest], np.int32)
        labels = ids.copy()
        if not self.source.train_on_inputs:
            labels[: len(start)] = IGNORE_INDEX
        return ids, labels

    def _segments(self, place: Place, row: dict[str, Any]) -> tuple[Ids, Ids]:
        column = self.source.field_segments
        segments = row.get(column)
        remedy = 'write a list of {"text": ..., "label": true or false}'
        if not isinstance(segments, list) or not segments:
            raise bad_row(place, f"{column!r} is no list of segments", remedy)
        ids: list[int] = []
        labels: list[int] = []
        for segment in segments:
            if not isinstance(segment, dict) or not isinstance(segment.get("label"), bool):
                raise bad_row(place, f"{column!r} holds {segment!r}", remedy)
            text = checked_text(place, f"{column}.text", segment.get("text"), remedy)
            found = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            ids += found
            labels += found if segment["label"] else [IGNORE_INDEX] * len(found)
        return np.array(ids, np.int32), np.array(labels, np.int32)


def require_eos(tokenizer: Any, name: str) -> int:
    """The id of the end-of-sequence token.

    Raises:
        DataError: when the tokenizer has none: documents could not be told apart, and a model
            trained on them would never stop.
    """
    if tokenizer.eos_token_id is None:
        raise DataError(
            f"the tokenizer of {name!r} has no end-of-sequence token, so documents would run "
            "into each other",
            remedy="name one of its tokens with eos_token: in the configuration, or give rows "
            "of type: tokens that end as they should",
        )
    return int(tokenizer.eos_token_id)


def _grouped(rows: Iterator[Row]) -> Iterator[list[Row]]:
    while group := list(islice(rows, CHUNK_ROWS)):
        yield group


def _text(place: Place, row: dict[str, Any], column: str, key: str = "text_field") -> str:
    if column not in row:
        have = ", ".join(map(repr, row)) or "nothing"
        raise bad_row(
            place,
            f"the row has no {column!r} (it has {have})",
            name_the_column(key, row),
        )
    return checked_text(place, column, row[column], "write a string, or drop the row")


def _token_chunk(rows: list[Row], months: Ids | None) -> TokenChunk:
    ids = [checked_ids(place, "input_ids", row.get("input_ids"), lowest=0) for place, row in rows]
    labels = [
        None if row.get("labels") is None else checked_labels(place, row["labels"], len(row_ids))
        for (place, row), row_ids in zip(rows, ids, strict=True)
    ]
    filled = None
    if any(label is not None for label in labels):
        # A row without labels beside rows with them supervises all of its tokens.
        pairs = zip(ids, labels, strict=True)
        filled = np.concatenate([i if label is None else label for i, label in pairs])
    return TokenChunk(
        input_ids=np.concatenate(ids),
        lengths=np.array([len(row) for row in ids], np.int64),
        labels=filled,
        months=months,
    )


def _pack(documents: Iterable[tuple[Ids, Ids]], months: Ids | None) -> TokenChunk:
    """A chunk of the documents in which something after the first token is supervised."""
    documents = list(documents)
    kept = [bool((labels[1:] != IGNORE_INDEX).any()) for _, labels in documents]
    chosen = [document for document, keep in zip(documents, kept, strict=True) if keep]
    empty = [np.empty(0, np.int32)]
    return TokenChunk(
        input_ids=np.concatenate([ids for ids, _ in chosen] or empty),
        lengths=np.array([len(ids) for ids, _ in chosen], np.int64),
        labels=np.concatenate([labels for _, labels in chosen] or empty),
        months=None if months is None else months[kept],
        num_unsupervised=len(documents) - len(chosen),
    )
