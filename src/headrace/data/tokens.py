"""Token stores: a dataset tokenised once, kept as flat memory-mapped files.

Owns the cache. A store's name is a hash of the bytes of its source files, of the tokenizer and
of what turns a row into tokens, so a store that exists is the right one and one that is not
finished does not exist (``store_writer.py`` makes it under another name). Files are raw
little-endian arrays beside a JSON description; nothing is pickled. Does not cut, pack or shuffle.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tempfile
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.data.files import file_format, resolve_files
from headrace.data.formats import RowEncoder
from headrace.data.parts import plan_parts
from headrace.data.sources import CHAT_TYPES, DatasetSource
from headrace.data.store_writer import FORMAT, StoreWriter, exclusive, remove_stale
from headrace.data.templates import resolve_template
from headrace.data.workers import choose_workers, encode_parts
from headrace.errors import CapacityError, ConfigError, DataError, HeadraceError, RankError

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    Progress = Callable[[int, int], None]  # documents, tokens so far

_STALE_SECONDS = 7 * 86_400.0


def default_cache_dir() -> Path:
    """``$HEADRACE_CACHE``, else ``$XDG_CACHE_HOME/headrace``, else ``~/.cache/headrace``."""
    if explicit := os.environ.get("HEADRACE_CACHE"):
        return Path(explicit).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "headrace"


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
        months: int32 ``(num_documents,)`` as :func:`~headrace.data.rows.month_of` counts them,
            or ``None``.
        num_unsupervised: rows that were left out because nothing in them is supervised.
    """

    folder: Path
    tokens: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int32] | None
    max_token_id: int
    months: npt.NDArray[np.int32] | None = None
    num_unsupervised: int = 0

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
        if meta["has_months"]:
            sizes["months"] = meta["num_documents"]
        for name, size in sizes.items():
            dtype = np.dtype("<i8" if name == "offsets" else "<i4")
            file = folder / f"{name}.bin"
            if file.stat().st_size != size * dtype.itemsize:
                return None
            # An empty file cannot be mapped.
            arrays[name] = np.memmap(file, dtype, mode="r") if size else np.empty(0, dtype)
    except (FileNotFoundError, ValueError, KeyError, RecursionError):
        return None
    return TokenStore(
        folder=folder,
        tokens=arrays["tokens"],
        offsets=arrays["offsets"],
        labels=arrays.get("labels"),
        max_token_id=meta["max_token_id"],
        months=arrays.get("months"),
        num_unsupervised=meta["num_unsupervised"],
    )


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


def tokenise(
    source: DatasetSource,
    tokenizer: Any,
    *,
    cache_dir: Path | None = None,
    progress: Progress | None = None,
    num_workers: int | None = None,
) -> TokenStore:
    """The token store of a dataset: opened if it was made before, else made now.

    A process that was killed leaves the parts it had finished, and the next one goes on there.

    Args:
        source: what to read.
        tokenizer: a Hugging Face tokenizer; may be ``None`` for ``tokens`` rows.
        cache_dir: where stores live, :func:`default_cache_dir` by default.
        progress: called after every part with documents and tokens so far.
        num_workers: processes; by default as many as the dataset is worth.

    Raises:
        DataError: files missing, a row unusable (named), no EOS, or no document at all.
        ConfigError: a file cannot be read, or the cache not written; chat rows without a template.
        CapacityError: the disk filled up; nothing is left behind.
    """
    root = (cache_dir or default_cache_dir()) / "tokens"
    try:
        store = _stored(source, tokenizer, root, progress, num_workers)
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise _full_disk(root) from error
        raise ConfigError(
            f"dataset {source.label!r} cannot be tokenised: {error.filename or root}: "
            f"{error.strerror or error}",
            remedy="make its files readable, and data_cache_dir: a folder that can be written",
        ) from error
    if len(store.tokens) == 0:
        left_out = f" ({store.num_unsupervised} supervise nothing)" * bool(store.num_unsupervised)
        raise DataError(
            f"dataset {source.label!r} is empty: "
            f"{len(resolve_files(source.path, source.split))} file(s), no document with tokens"
            f"{left_out}",
            remedy="give it documents, or remove it from datasets:",
        )
    return store


def _stored(
    source: DatasetSource,
    tokenizer: Any,
    root: Path,
    progress: Progress | None,
    num_workers: int | None,
) -> TokenStore:
    RowEncoder(source, tokenizer)  # refuses what it lacks before anything is read
    files = resolve_files(source.path, source.split)
    key = _key(source, tokenizer, [_file_digest(file, root / "digests") for file in files], files)
    folder = root / key
    if (store := _open(folder)) is not None:
        return store
    root.mkdir(parents=True, exist_ok=True)
    remove_stale(root, _STALE_SECONDS)
    workers = choose_workers(num_workers, sum(file.stat().st_size for file in files))
    while (store := _open(folder)) is None:
        temporary = root / f".writing-{key}"
        with exclusive(temporary) as held:
            if held and _open(folder) is None:
                _write(temporary, source, tokenizer, progress, workers)
                # Another machine's may have come into sight meanwhile, and is in use there.
                if _open(folder) is None:
                    shutil.rmtree(folder, ignore_errors=True)  # one that lost bytes, see _open
                    temporary.rename(folder)
            if held:
                shutil.rmtree(temporary, ignore_errors=True)
    return store


def _key(source: DatasetSource, tokenizer: Any, digests: list[str], files: list[Path]) -> str:
    recipe: dict[str, Any] = {"format": FORMAT, **source.recipe()}
    if source.type != "tokens":
        recipe["tokenizer"] = tokenizer_fingerprint(tokenizer)
    if source.type in CHAT_TYPES or (
        source.type == "prompt_completion" and (source.chat_template or tokenizer.chat_template)
    ):
        recipe["chat_template"] = resolve_template(source.chat_template, tokenizer)
    pairs = zip(digests, files, strict=True)
    recipe["files"] = [[digest, file_format(file)] for digest, file in pairs]
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:32]


def _full_disk(root: Path, when: str = "") -> CapacityError:
    return CapacityError(
        f"the disk of {root} filled up{when}",
        remedy="free space, or set data_cache_dir: to a larger disk "
        "(4 bytes a token, 8 with labels)",
    )


def _write(
    folder: Path,
    source: DatasetSource,
    tokenizer: Any,
    progress: Progress | None,
    num_workers: int,
) -> None:
    writer = StoreWriter(folder)
    try:
        parts = plan_parts(source)[writer.counts.parts :]
        for chunks in encode_parts(parts, source, tokenizer, num_workers):
            for chunk in chunks:
                writer.append(chunk)
            writer.part_done()
            if progress is not None:
                progress(writer.counts.num_documents, writer.counts.num_tokens)
        writer.finish()
    except (HeadraceError, OSError) as error:
        if isinstance(error, RankError) or isinstance(error.__cause__, BrokenProcessPool):
            writer.sync()  # the parts are good, and the next start goes on from them
            raise
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT}:
            written = writer.counts.num_tokens * 4
            raise _full_disk(folder.parent, f" after {written} bytes of tokens") from error
        raise
    except BaseException:
        writer.sync()  # stopped from outside
        raise
    finally:
        writer.close()
