"""How many tokens a dataset holds, before it is tokenised.

Reads names, sizes and the footers of Parquet files. Token columns of Parquet are counted exactly;
text is assumed to be :data:`BYTES_A_TOKEN` bytes a token. What cannot be told cheaply (compressed
files, a part of a file) gives None. Needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.data.files import file_format, resolve_files
from headrace.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from headrace.data.sources import DatasetSource

BYTES_A_TOKEN = 4  # English text and vocabularies of 32k to 256k: 4 to 4.5
_DIGITS_A_TOKEN = 6  # of a number, its comma and a space in a JSON list


def epoch_tokens(sources: Sequence[DatasetSource]) -> tuple[int, bool] | None:
    """Tokens of an epoch and whether they were counted, or None where they cannot be told.

    With weights an epoch ends when the first dataset has been used once.
    """
    found = [_tokens(source) for source in sources]
    known = [entry for entry in found if entry is not None]
    if len(known) < len(found) or not known:
        return None
    counted = all(exact for _, exact in known)
    weights = [source.weight for source in sources]
    if any(weight is not None for weight in weights):
        total = sum(weight or 0 for weight in weights)
        shares = [(weight or 0) / total for weight in weights]
        reach = [count / part for (count, _), part in zip(known, shares, strict=True) if part]
        return round(min(reach)), counted
    return sum(count for count, _ in known), counted


def _tokens(source: DatasetSource) -> tuple[int, bool] | None:
    if source.max_samples is not None or "[" in (source.split or ""):
        return None
    try:
        counts = [_of_file(file, source) for file in resolve_files(source.path, source.split)]
    except (DataError, OSError):
        return None
    whole = [count for count in counts if count is not None]
    if len(whole) < len(counts):
        return None
    return sum(count for count, _ in whole), all(exact for _, exact in whole)


def _of_file(file: Path, source: DatasetSource) -> tuple[int, bool] | None:
    kind = file_format(file)
    if kind == ".parquet":
        return _of_parquet(file, source)
    if kind not in (".jsonl", ".ndjson", ".json"):
        return None
    size = file.stat().st_size
    return size // (_DIGITS_A_TOKEN if source.type == "tokens" else BYTES_A_TOKEN), False


def _of_parquet(file: Path, source: DatasetSource) -> tuple[int, bool] | None:
    import pyarrow as pa  # noqa: PLC0415 - only where there are Parquet files
    import pyarrow.parquet as pq  # noqa: PLC0415 - as above

    try:
        with pq.ParquetFile(file) as parquet:
            footer = parquet.metadata
    except (OSError, pa.ArrowException):
        return None
    wanted = "input_ids" if source.type == "tokens" else source.text_field
    values = size = 0
    for group in range(footer.num_row_groups):
        for column in range(footer.num_columns):
            chunk = footer.row_group(group).column(column)
            named = chunk.path_in_schema.partition(".")[0] == wanted
            if named or source.type not in ("tokens", "text"):  # a conversation has many columns
                values += chunk.num_values
                size += chunk.total_uncompressed_size
    return (values, True) if source.type == "tokens" else (size // BYTES_A_TOKEN, False)
