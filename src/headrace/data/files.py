"""Which files a dataset's ``path`` means, in a fixed order.

Owns formats, splits and the layouts that ``datasets`` leaves on a disk. Files are taken in the
order of their names, so the same input always gives the same documents. Opens no data file and
uses no network.
"""

from __future__ import annotations

import glob
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable

# .json last: it ends many files that are no data.
SUFFIXES = (".jsonl", ".ndjson", ".jsonl.gz", ".parquet", ".arrow", ".json")
_KNOWN = ", ".join(SUFFIXES)
# Files that stand beside data and describe it.
_DESCRIPTIONS = re.compile(
    r"(dataset_infos?|dataset_dict|state|config|manifest|run|package|generation_config)\.json"
)
_SPLIT = re.compile(r"(?P<name>[^\[\]]+)(?:\[(?P<first>\d*%?):(?P<last>\d*%?)\])?")
_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://(?P<rest>.*)", re.IGNORECASE)
# hf://datasets/OWNER/NAME/..., or the same behind the hub's host, with a revision.
_HUB = re.compile(
    r"(?:^|/)datasets/(?P<name>[\w.-]+/[\w.-]+)(?:/(?:resolve|blob|tree)/[^/]+)?/?(?P<pattern>.*)"
)
# The words that `datasets` looks for in file names.
_SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}


def file_format(path: Path) -> str | None:
    """Which of :data:`SUFFIXES` a file has."""
    return next((suffix for suffix in SUFFIXES if path.name.endswith(suffix)), None)


def parse_split(split: str | None) -> tuple[str | None, str, str]:
    """Name, first and last of ``name[first:last]``, the latter as counts or percentages.

    Raises:
        DataError: it is written otherwise.
    """
    if split is None:
        return None, "", ""
    match = _SPLIT.fullmatch(split.strip())
    if match is None:
        raise DataError(f"split {split!r} is not understood", remedy="train, or train[:20%]")
    return match["name"], match["first"] or "", match["last"] or ""


def resolve_files(path: str, split: str | None = None) -> list[Path]:
    """The data files that ``path`` means, sorted by name.

    Args:
        path: a file, a folder, a pattern, or a name in the local hub cache.
        split: as in :attr:`DatasetSource.split`; a slice in it is not looked at.

    Raises:
        DataError: when nothing is there, or what is there has no readable format.
    """
    if not path:
        raise DataError("a dataset has an empty path", remedy="name a file, a folder or a pattern")
    if (match := _ADDRESS.match(path)) is not None:
        raise DataError(
            f"dataset {path!r} is an address, and headrace reads files of this machine, streamed "
            "ones too: a run must not end because a network does",
            remedy=_fetch(match["rest"]),
        )
    try:
        expanded = Path(path).expanduser()
    except RuntimeError as error:
        raise DataError(
            f"dataset {path!r}: {error}", remedy="write the home directory out"
        ) from error
    try:
        return _found(path, expanded, parse_split(split)[0])
    except OSError as error:
        raise DataError(
            f"dataset {path!r} cannot be listed: {error.filename}: {error.strerror}",
            remedy="make it readable, or name the files in it that are",
        ) from error


def _found(path: str, expanded: Path, wanted: str | None) -> list[Path]:
    if expanded.is_file():
        if file_format(expanded) is None:
            raise DataError(
                f"dataset {path!r} has no readable format", remedy=f"headrace reads {_KNOWN}"
            )
        # As in `datasets`, a file by itself is a training split, whatever it is called.
        if wanted in ("train", expanded.parent.name):
            return [expanded]
        return _of_split(path, [expanded], wanted, within=expanded.parent)
    if not expanded.is_dir() and not glob.has_magic(path):
        expanded = _cached(path)
    if expanded.is_dir():
        return _of_folder(path, expanded, wanted)
    matches = glob.iglob(str(expanded), recursive=True)  # noqa: PTH207 - absolute patterns too
    return _of_split(path, _data(map(Path, matches)), wanted)


def _cached(path: str) -> Path:
    """The folder of a dataset that was fetched before."""
    if re.fullmatch(r"[\w.-]+/[\w.-]+", path):
        from huggingface_hub import snapshot_download  # noqa: PLC0415 - only for names
        from huggingface_hub.errors import LocalEntryNotFoundError  # noqa: PLC0415 - as above

        try:
            return Path(snapshot_download(path, repo_type="dataset", local_files_only=True))
        except (LocalEntryNotFoundError, ValueError):
            pass
    raise _missing(path)


def _missing(path: str) -> DataError:
    remedy = "correct the path under datasets:"
    if not path.endswith(SUFFIXES):
        remedy += f", or fetch it first: {_command(path)}"
    return DataError(
        f"dataset {path!r} does not exist (looked from {Path.cwd()}, and in the local hub cache)",
        remedy=remedy,
    )


def _fetch(rest: str) -> str:
    """How to bring what an address means to this machine."""
    match = _HUB.search(rest)
    if match is None:
        return "fetch it first (curl, aws s3 sync, gcloud storage cp ...) or mount it, and name it"
    named, pattern = match["name"], match["pattern"]
    part = f" --include '{pattern}'" if pattern else ""
    return f"fetch it first: {_command(named)}{part}, and give path: {named}"


def _command(name: str) -> str:
    return f"hf download --repo-type dataset {name}"


def _data(found: Iterable[Path]) -> list[Path]:
    files = sorted(
        file
        for file in found
        if file.is_file() and file_format(file) and not file.name.startswith(".")
    )
    plain = [file for file in files if file_format(file) != ".json"]
    return plain or [file for file in files if not _DESCRIPTIONS.fullmatch(file.name)]


def _of_folder(path: str, folder: Path, wanted: str | None) -> list[Path]:
    if (folder / "dataset_dict.json").is_file():
        return _saved(_chosen(path, folder, wanted))
    if (folder / "state.json").is_file():
        if wanted not in (None, "train"):
            raise DataError(
                f"dataset {path!r} has no split {wanted!r}: save_to_disk wrote it as one dataset",
                remedy="leave split out",
            )
        return _saved(folder)
    return _of_split(path, _data(folder.rglob("*")), wanted, within=folder)


def _chosen(path: str, folder: Path, wanted: str | None) -> Path:
    """The split of a saved ``DatasetDict``."""
    try:
        splits = [
            str(name) for name in json.loads((folder / "dataset_dict.json").read_text())["splits"]
        ]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(
            f"{folder} is not a whole dataset of save_to_disk ({error!r})", remedy="save it again"
        ) from error
    if wanted is None and len(splits) == 1:
        wanted = splits[0]
    if wanted not in splits:
        raise DataError(
            f"dataset {path!r} has the splits {', '.join(splits)}"
            + (f", not {wanted!r}" if wanted else ", and none is chosen"),
            remedy=f"split: {splits[0]}",
        )
    return folder / str(wanted)


def _saved(folder: Path) -> list[Path]:
    """Arrow files of a dataset that ``save_to_disk`` wrote, in its order."""
    try:
        state = json.loads((folder / "state.json").read_text())
        return [folder / entry["filename"] for entry in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(
            f"{folder} is not a whole dataset of save_to_disk ({error!r})", remedy="save it again"
        ) from error


def _of_split(
    path: str, files: list[Path], wanted: str | None, within: Path | None = None
) -> list[Path]:
    if not files:
        raise DataError(f"dataset {path!r} holds no data files", remedy=f"headrace reads {_KNOWN}")
    if wanted is None:
        return files
    named = {
        file: _split_of(file if within is None else file.relative_to(within)) for file in files
    }
    chosen = [file for file in files if wanted in (named[file], *_words(file, wanted))]
    if not chosen and wanted == "train" and not any(named.values()):
        return files  # as in `datasets`, files that name no split are the training split
    if not chosen:
        found = sorted({name for name in named.values() if name}) or ["train"]
        raise DataError(
            f"dataset {path!r} has no split {wanted!r} (its files name {', '.join(found)})",
            remedy=f"split: {found[0]}",
        )
    return chosen


def _split_of(file: Path) -> str | None:
    for split, words in _SPLIT_WORDS.items():
        if any(_has_word(str(file), word) for word in words):
            return split
    return None


def _words(file: Path, wanted: str) -> tuple[str, ...]:
    return (wanted,) if _has_word(file.name, wanted) else ()


def _has_word(text: str, word: str) -> bool:
    return re.search(rf"(?:^|[-._ /0-9]){re.escape(word)}(?:[-._ /0-9]|$)", text) is not None
