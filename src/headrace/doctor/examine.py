"""Every check in order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.doctor.gpu import check_cards, check_torch, check_transfers, list_cards
from headrace.doctor.host import check_disk, check_memory, check_numa, check_processor
from headrace.doctor.kernels import check_kernels
from headrace.doctor.versions import check_versions

if TYPE_CHECKING:
    from headrace.doctor.findings import Finding


def examine(*, measure: bool = True) -> list[Finding]:
    """Look at this machine.

    Args:
        measure: also time transfers and attention on each card (seconds, half a GiB a card).
    """
    cards = list_cards()
    findings = [
        *check_processor(),
        *check_kernels(),
        *check_memory(),
        *check_numa(),
        *check_disk(),
        *check_cards(cards),
    ]
    seen = check_torch(cards)
    findings += seen
    if measure and cards and all(finding.status == "ok" for finding in seen):
        from headrace.doctor.measure import measure_card  # noqa: PLC0415 - imports torch

        for index in range(len(cards)):
            findings += check_transfers(index, measure_card(index))
    return [*findings, *check_versions(tuple(card.name for card in cards))]
