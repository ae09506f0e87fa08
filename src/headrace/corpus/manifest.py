"""What a corpus says about itself: ``manifest.json`` in its folder.

The manifest holds no time of the build, no absolute path and no machine's name: the same inputs
and settings give the same bytes. Its schema is described in ``docs/corpus.md``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.errors import ConfigError, DataError

if TYPE_CHECKING:
    from collections.abc import Mapping

FORMAT = "headrace-corpus"
FORMAT_VERSION = 1
MANIFEST_FILE = "manifest.json"
_BUILD_AGAIN = "give the folder that headrace corpus build made, or build it again"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A corpus folder and its manifest.

    With several cutoffs the folder holds one corpus folder a vintage, and ``vintages`` are
    their manifests; with one cutoff it is itself the only vintage.
    """

    path: Path
    data: Mapping[str, Any]

    @staticmethod
    def load(folder: str | Path) -> Manifest:
        """Read a corpus folder's manifest.

        Raises:
            ConfigError: there is no corpus.
            DataError: the manifest is damaged or of a later format.
        """
        path = Path(folder)
        file = path / MANIFEST_FILE if path.is_dir() else path
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise ConfigError(
                f"{folder} holds no corpus: there is no {MANIFEST_FILE}",
                remedy="give the output_dir of 'headrace corpus build'",
            ) from error
        except (OSError, ValueError) as error:
            raise DataError(f"{file} cannot be read: {error}", remedy=_BUILD_AGAIN) from error
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise DataError(f"{file} is not a corpus manifest", remedy=_BUILD_AGAIN)
        if data["version"] > FORMAT_VERSION:
            raise DataError(
                f"{file} has format version {data['version']}, newer than {FORMAT_VERSION}",
                remedy="update headrace",
            )
        return Manifest(path=file.parent, data=data)

    @property
    def vintages(self) -> tuple[Manifest, ...]:
        """Manifests of the vintages, earliest first; the corpus itself if it is one."""
        names = self.data.get("vintages")
        if names is None:
            return (self,)
        return tuple(Manifest.load(self.path / entry["path"]) for entry in names)

    @property
    def cutoff(self) -> str:
        """The cutoff as an instant in UTC; of the latest vintage where there are several."""
        return str(self.data["cutoff"])

    @property
    def counts(self) -> Mapping[str, Any]:
        """Documents, tokens, bytes, and how every other record ended."""
        counts: Mapping[str, Any] = self.data["counts"]
        return counts

    @property
    def num_documents(self) -> int:
        """Documents in the corpus."""
        return int(self.counts["documents"])

    @property
    def num_tokens(self) -> int | None:
        """Tokens in the shards, or ``None`` without a tokenizer."""
        tokens = self.counts["tokens"]
        return None if tokens is None else int(tokens)

    @property
    def documents_dir(self) -> Path:
        """Folder of the documents' Parquet files."""
        return self.path / "documents"

    @property
    def tokens_dir(self) -> Path | None:
        """Folder of the token shards (``datasets: [{path: …, type: tokens}]``)."""
        return None if self.data["tokenizer"] is None else self.path / "tokens"

    @property
    def tokenizer_dir(self) -> Path | None:
        """Folder that ``AutoTokenizer.from_pretrained`` loads."""
        return None if self.data["tokenizer"] is None else self.path / "tokenizer"

    @property
    def checks(self) -> list[Mapping[str, Any]]:
        """Every check with status, value, limit, counts and examples."""
        checks: list[Mapping[str, Any]] = self.data["checks"]
        return checks
