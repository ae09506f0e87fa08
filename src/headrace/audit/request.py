"""What a user asks of an audit, from command-line pairs.

Owns the parsing of ``NAME=VALUE`` options and the assembly of one request; a YAML recipe
(:mod:`headrace.audit.recipe`) gives the same request. The invariant: every name and file is
checked before anything is computed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.audit.config import AuditConfig
from headrace.audit.run import run_audit
from headrace.audit.sources import EmbeddingSource, source_from_file
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from headrace.audit.panel import Panel
    from headrace.audit.published_defects import PublishedOptions
    from headrace.audit.recall import RecallAnswers
    from headrace.audit.records import AuditResult, PerplexityRecord


@dataclass(frozen=True, kw_only=True)
class AuditRequest:
    """Everything :func:`headrace.audit.run_audit` is given."""

    panel: Panel
    embeddings: dict[str, EmbeddingSource]
    cutoffs: dict[str, str] = field(default_factory=dict)
    twins: dict[str, EmbeddingSource] = field(default_factory=dict)
    reference: str | None = None
    reductions: tuple[tuple[str, str], ...] = ()
    recall: dict[str, RecallAnswers] = field(default_factory=dict)
    perplexity: dict[str, tuple[PerplexityRecord, ...]] = field(default_factory=dict)
    published: PublishedOptions | None = None
    config: AuditConfig = field(default_factory=AuditConfig)

    def run(self, progress: Callable[[str], None] | None = None) -> AuditResult:
        """Do it."""
        return run_audit(
            self.panel,
            self.embeddings,
            self.cutoffs,
            twins=self.twins,
            reference=self.reference,
            reductions=self.reductions,
            recall=self.recall,
            perplexity=self.perplexity,
            published=self.published,
            config=self.config,
            progress=progress,
        )


def model_pairs(options: Sequence[str], flag: str) -> tuple[tuple[str, str], ...]:
    """``["base=lora", "base=full"]`` as pairs; a model may stand in several.

    Raises:
        ConfigError: an option without ``=``, an empty side, a model with itself, or a pair twice.
    """
    found: list[tuple[str, str]] = []
    for option in options:
        ((first, second),) = pairs([option], flag).items()
        if first == second:
            raise ConfigError(
                f"{flag} {option!r} compares a model with itself",
                remedy="name two models: BASE=TRAINED",
            )
        if (first, second) in found:
            raise ConfigError(f"{flag} gives {option!r} twice", remedy="give it once")
        found.append((first, second))
    return tuple(found)


def pairs(options: Sequence[str], flag: str) -> dict[str, str]:
    """``["a=x", "b=y"]`` as a dictionary.

    Raises:
        ConfigError: an option without ``=``, an empty side, or a name given twice.
    """
    found: dict[str, str] = {}
    for option in options:
        name, separator, value = option.partition("=")
        if not separator or not name or not value:
            raise ConfigError(f"{flag} {option!r} is not NAME=VALUE", remedy=f"{flag} NAME=VALUE")
        if name in found:
            raise ConfigError(f"{flag} gives {name!r} twice", remedy="give each name once")
        found[name] = value
    return found


def file_sources(options: Sequence[str], flag: str) -> dict[str, EmbeddingSource]:
    """``NAME=FILE`` options as sources.

    Raises:
        ConfigError: as :func:`pairs`, or a file that is not there.
    """
    sources = {}
    for name, text in pairs(options, flag).items():
        path = Path(text)
        if not path.is_file():
            raise ConfigError(
                f"{flag} {name}={text}: no such file",
                remedy="check the path; headrace embed makes such files",
            )
        sources[name] = source_from_file(path)
    return sources
