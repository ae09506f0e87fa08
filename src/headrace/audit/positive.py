"""The positive control: would a leak of known size have been found on this panel?

Owns one experiment at each cutoff. The invariant: the planted embedding meets the same rows,
folds, reference and test as the audited models, and is judged alone, so its answer is the power
of the contrast here and not of some other panel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from headrace.audit import limits
from headrace.audit.conclude import channel_contrast, reference_gains
from headrace.audit.config import parse_date
from headrace.audit.measure import Layout, Measurement, measure, project
from headrace.audit.records import CHANNELS, ControlRecord, Figure
from headrace.audit.resample import holm
from headrace.audit.synthetic_embeddings import knowledge_of_panel, plant
from headrace.audit.tables import FigureMaker
from headrace.audit.verdict import excuse
from headrace.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from headrace.audit.boundary import Contrast
    from headrace.audit.records import Channel


def positive_control(
    values: NDArray[np.floating],
    cutoff: str,
    layout: Layout,
    reference: Sequence[Measurement],
    *,
    stack: str,
) -> ControlRecord | None:
    """Plant a leak into an embedding, up to ``cutoff``, and test it.

    Args:
        values: ``(n, D)`` of an embedding to plant it in: a twin, or an audited model, whose
            own knowledge then adds to what is planted.
        cutoff: ISO date.
        layout: of the audit.
        reference: what the contrast subtracts.
        stack: fingerprint of the embedding.

    Returns:
        ``None`` where the cutoff leaves too little on a side, or the target cannot hold the leak.
    """
    panel, config = layout.panel, layout.config
    last = parse_date(cutoff, "cutoff")
    cutoff_session = panel.session_of(last)
    if min(limits.sides(panel, cutoff_session)) < config.min_sessions_a_side:
        return None
    share = config.positive_control
    knowledge = knowledge_of_panel(panel, share=share, channels=CHANNELS, cutoff=last)
    if any(planted.signal.var() <= share for planted in knowledge):
        return None
    rng = np.random.default_rng((config.seed, 3))
    narrow = project(values, config.twin_max_dimension, config.seed)
    measured = measure(plant(narrow, panel, knowledge, rng), layout, twin=True, tables=False)
    gains = reference_gains(measured, reference, layout)
    results: dict[Channel, tuple[Contrast, Contrast]] = {}
    for channel, gain in gains.items():
        try:
            results[channel] = (
                channel_contrast(gain, layout, channel, cutoff_session),
                channel_contrast(
                    measured.skill[channel].deviation, layout, channel, cutoff_session
                ),
            )
        except DataError:
            continue
    adjusted = holm([over.p_value for over, _ in results.values()])
    make = FigureMaker(stack=stack)
    figures: dict[str, Figure] = {
        channel: make.contamination(pair, layout, channel, p, "as the models").contrast
        for (channel, pair), p in zip(results.items(), adjusted, strict=True)
    }
    return ControlRecord(
        cutoff=cutoff,
        planted_share=share,
        detected=any(
            p <= config.level
            and not excuse(
                over.contrast.value,
                before=over.before.value,
                own_p=own.p_value,
                brief=over.brief,
            )
            for (over, own), p in zip(results.values(), adjusted, strict=True)
        ),
        contrasts=figures,
    )
