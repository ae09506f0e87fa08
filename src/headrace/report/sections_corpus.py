"""What the models were trained on: effective dates, counts, and the checks of each corpus."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.report.page import Block, Note, Section

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.report.records import Corpus


def corpus(corpora: Sequence[Corpus]) -> Section:
    """The section for any number of corpora, none included."""
    blocks: list[Block] = []
    if not corpora:
        blocks.append(
            Note(
                kind="missing",
                text="No corpus manifest was given, so the dates of the training text are not "
                "drawn and its checks were not looked at.",
            )
        )
    return Section(name="corpus", title="What it was trained on", short="Corpus", blocks=blocks)
