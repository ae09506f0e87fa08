"""Token stores: a dataset tokenised once, kept as flat memory-mapped files.

Owns the cache. A store's name is a hash of the bytes of its source files, of the tokenizer and
of what turns a row into tokens, so a store that exists is the right one and one that is not
finished does not exist (it is written under a temporary name and renamed). Files are raw
little-endian arrays beside a JSON description; nothing is pickled.

A ``text`` row becomes what the tokenizer makes of it, special tokens included, and ends with
EOS. A ``tokens`` row is taken as it is. Does not cut, pack or shuffle.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tempfile
import time
from array import array
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.data.rows import TokenChunk
from headrace.data.sources import (
    DatasetSource,
    file_format,
    iter_texts,
    iter_tokens,
    resolve_files,
)
from headrace.errors import CapacityError, ConfigError, DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy.typing as npt

    Progress = Callable[[int, int], None]  # documents, tokens so far

_FORMAT = 1
_STALE_SECONDS = 86_400.0


def default_cache_dir() -> Path:
    """``$HEADRACE_CACHE``, else ``$XDG_CACHE_HOME/headrace``, else ``~/.cache/headrace``."""
    if explicit := os.environ.get("HEADRACE_CACHE"):
        return Path(explicit).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "headrace"


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


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Hash of everything that decides which ids a text becomes."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = (
        backend.to_str()
        if backend is not None
        else json.dumps([sorted(tokenizer.get_vocab().items()), repr(tokenizer)])
    )
    parts = [type(tokenizer).__name__, str(tokenizer.eos_token_id), rules]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class TokenStore:
    """A tokenised dataset, read through the page cache.

    Attributes:
        folder: where it lies; its name is the content hash.
        tokens: int32 ``(num_tokens,)``, documents back to back.
        offsets: int64 ``(num_documents + 1,)``, where each begins in ``tokens``.
        labels: int32 ``(num_tokens,)`` aligned with ``tokens``, or ``None``: all supervised.
        max_token_id: the largest id in ``tokens`` and ``labels``.
    """

    folder: Path
    tokens: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int32] | None
    max_token_id: int

    @property
    def key(self) -> str:
        """The content hash."""
        return self.folder.name

    @property
    def num_documents(self) -> int:
        """Documents, empty ones included."""
        return len(self.offsets) - 1

    def check_vocabulary(self, vocab_size: int, label: str) -> None:
        """Refuse ids that the model has no row for.

        Raises:
            DataError: naming the first document at fault.
        """
        if self.max_token_id < vocab_size:
            return
        over = self.tokens >= vocab_size
        if self.labels is not None:
            over |= self.labels >= vocab_size
        document = int(np.searchsorted(self.offsets, int(over.argmax()), side="right")) - 1
        raise DataError(
            f"dataset {label!r}: document {document} (counted from 0) holds a token id past the "
            f"model's vocabulary of {vocab_size} (largest id: {self.max_token_id})",
            remedy="tokenise with the model's own tokenizer",
        )


def _open(folder: Path) -> TokenStore | None:
    """The store in ``folder``; ``None`` when it is absent or its files lost bytes."""
    try:
        meta = json.loads((folder / "meta.json").read_text())
        arrays: dict[str, npt.NDArray[Any]] = {}
        sizes = {"offsets": meta["num_documents"] + 1, "tokens": meta["num_tokens"]}
        if meta["has_labels"]:
            sizes["labels"] = meta["num_tokens"]
        for name, size in sizes.items():
            dtype = np.dtype("<i8" if name == "offsets" else "<i4")
            file = folder / f"{name}.bin"
            if file.stat().st_size != size * dtype.itemsize:
                return None
            # An empty file cannot be mapped.
            arrays[name] = np.memmap(file, dtype, mode="r") if size else np.empty(0, dtype)
    except (FileNotFoundError, ValueError, KeyError):
        return None
    return TokenStore(
        folder=folder,
        tokens=arrays["tokens"],
        offsets=arrays["offsets"],
        labels=arrays.get("labels"),
        max_token_id=meta["max_token_id"],
    )


class _Writer:
    """Appends chunks to the files of a store under a temporary name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lengths = array("q")
        self.max_token_id = -1
        self.num_tokens = 0
        self._tokens = (folder / "tokens.bin").open("wb")
        self._labels: Any = None

    def append(self, chunk: TokenChunk) -> None:
        if chunk.labels is not None and self._labels is None:
            # Documents before the first one with labels supervise all of their tokens.
            self._tokens.flush()
            shutil.copyfile(self.folder / "tokens.bin", self.folder / "labels.bin")
            self._labels = (self.folder / "labels.bin").open("ab")
        self._tokens.write(chunk.input_ids.astype("<i4", copy=False).tobytes())
        labels = chunk.input_ids if chunk.labels is None else chunk.labels
        if self._labels is not None:
            self._labels.write(labels.astype("<i4", copy=False).tobytes())
        if len(labels):
            self.max_token_id = max(
                self.max_token_id, int(chunk.input_ids.max()), int(labels.max())
            )
        self.lengths.extend(chunk.lengths.tolist())
        self.num_tokens += len(chunk.input_ids)

    def close(self) -> None:
        self._tokens.close()
        if self._labels is not None:
            self._labels.close()

    def finish(self) -> None:
        self.close()
        offsets = np.zeros(len(self.lengths) + 1, "<i8")
        np.cumsum(np.frombuffer(self.lengths, np.int64), out=offsets[1:])
        offsets.tofile(self.folder / "offsets.bin")
        meta = {
            "format": _FORMAT,
            "num_documents": len(self.lengths),
            "num_tokens": self.num_tokens,
            "has_labels": self._labels is not None,
            "max_token_id": self.max_token_id,
        }
        (self.folder / "meta.json").write_text(json.dumps(meta, indent=1))


def _file_digest(file: Path, memo_dir: Path) -> str:
    """SHA-256 of a file, remembered by (path, size, times) so that a restart reads nothing."""
    stat = file.stat()
    seen = [str(file.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
    memo = memo_dir / hashlib.sha256(json.dumps(seen).encode()).hexdigest()
    if memo.is_file() and len(digest := memo.read_text()) == 64:
        return digest
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    memo_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=memo_dir, delete=False) as temporary:
        temporary.write(digest)
    Path(temporary.name).replace(memo)
    return digest


def _text_chunks(source: DatasetSource, files: list[Path], tokenizer: Any) -> Iterator[TokenChunk]:
    eos = int(tokenizer.eos_token_id)
    for texts in iter_texts(files, source.text_field):
        encoded = tokenizer(
            texts, add_special_tokens=True, return_attention_mask=False, verbose=False
        )["input_ids"]
        # An empty text holds nothing to learn; a lone EOS would teach to end before beginning.
        rows = [
            ids if ids[-1] == eos else [*ids, eos]
            for text, ids in zip(texts, encoded, strict=True)
            if text and ids
        ]
        if rows:
            yield TokenChunk(
                input_ids=np.fromiter(chain.from_iterable(rows), np.int32),
                lengths=np.array([len(ids) for ids in rows], np.int64),
                labels=None,
            )


def _remove_stale(cache_dir: Path) -> None:
    """Temporary folders of writers that were killed long ago."""
    for folder in cache_dir.glob(".writing-*"):
        if time.time() - folder.stat().st_mtime > _STALE_SECONDS:
            shutil.rmtree(folder, ignore_errors=True)


def tokenise(
    source: DatasetSource,
    tokenizer: Any,
    *,
    cache_dir: Path | None = None,
    progress: Progress | None = None,
) -> TokenStore:
    """The token store of a dataset: opened if it was made before, else made now.

    Args:
        source: what to read.
        tokenizer: a Hugging Face tokenizer; may be ``None`` for ``tokens`` rows.
        cache_dir: where stores live, :func:`default_cache_dir` by default.
        progress: called after every chunk with documents and tokens so far.

    Raises:
        DataError: files missing, a row unusable (named), no EOS, or no document at all.
        ConfigError: a file cannot be read, or the cache not written.
        CapacityError: the disk filled up; nothing is left behind.
    """
    root = (cache_dir or default_cache_dir()) / "tokens"
    try:
        store = _stored(source, tokenizer, root, progress)
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise _full_disk(root) from error
        raise ConfigError(
            f"dataset {source.label!r} cannot be tokenised: {error.filename or root}: "
            f"{error.strerror or error}",
            remedy="make its files readable, and data_cache_dir: a folder that can be written",
        ) from error
    if len(store.tokens) == 0:
        raise DataError(
            f"dataset {source.label!r} is empty: {len(resolve_files(source.path))} file(s), "
            "no document with tokens",
            remedy="give it documents, or remove it from datasets:",
        )
    return store


def _stored(
    source: DatasetSource, tokenizer: Any, root: Path, progress: Progress | None
) -> TokenStore:
    files = resolve_files(source.path)
    recipe: dict[str, Any] = {"format": _FORMAT, "type": source.type}
    if source.type == "text":
        if tokenizer is None:
            raise DataError(
                f"dataset {source.label!r} has type: text but there is no tokenizer",
                remedy="name one with tokenizer_name_or_path:, or give rows of type: tokens",
            )
        require_eos(tokenizer, getattr(tokenizer, "name_or_path", "") or "this model")
        recipe |= {"field": source.text_field, "tokenizer": tokenizer_fingerprint(tokenizer)}
    recipe["files"] = [[_file_digest(file, root / "digests"), file_format(file)] for file in files]
    folder = root / hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:32]
    store = _open(folder)
    if store is None:
        chunks = (
            iter_tokens(files)
            if source.type == "tokens"
            else _text_chunks(source, files, tokenizer)
        )
        _write(folder, chunks, progress)
        store = _open(folder)
        assert store is not None
    return store


def _full_disk(root: Path, when: str = "") -> CapacityError:
    return CapacityError(
        f"the disk of {root} filled up{when}",
        remedy="free space, or set data_cache_dir: to a larger disk "
        "(4 bytes a token, 8 with labels)",
    )


def _write(folder: Path, chunks: Iterator[TokenChunk], progress: Progress | None) -> None:
    root = folder.parent
    root.mkdir(parents=True, exist_ok=True)
    _remove_stale(root)
    temporary = Path(tempfile.mkdtemp(prefix=".writing-", dir=root))
    writer = None
    try:
        writer = _Writer(temporary)
        for chunk in chunks:
            writer.append(chunk)
            if progress is not None:
                progress(len(writer.lengths), writer.num_tokens)
        writer.finish()
        shutil.rmtree(folder, ignore_errors=True)  # one that lost bytes, see _open
        temporary.rename(folder)
    except OSError as error:
        if error.errno == errno.ENOTEMPTY and _open(folder) is not None:
            return  # another process finished the same store first
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            written = writer.num_tokens * 4 if writer else 0
            raise _full_disk(root, f" after {written} bytes of tokens") from error
        raise
    finally:
        if writer is not None:
            writer.close()
        shutil.rmtree(temporary, ignore_errors=True)
