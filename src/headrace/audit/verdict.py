"""From figures to one of five words, and the sentences that go with it.

Owns the rule. The invariant: ``knows_the_future`` is only ever said because of the contrast
around a model's own cutoff or the recall probe; premiums, R2 and skill never lead to it. Pure
functions of numbers; nothing is estimated here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.audit.boundary import Brief
    from headrace.audit.records import Channel, Verdict

# The least share of var(y) that is called knowledge of the future. A date-block t of predictions
# that are almost constant can be significant at a ten-thousandth of the variance; leaks worth 0.03
# of R2 measured 0.001 to 0.036 (5 and 95% of simulated panels), nothing known 0.0009 at 95%
# (benchmarks/audit_calibration.py).
LEAST_SHARE = 0.002

# The gain before the cutoff must be of that size itself, or make up this part of the contrast: what
# is known helps there. A model that predicts nothing before and, by bad luck, worse than nothing
# after has the same contrast.
BEFORE_PART = 0.5

# The model's own predictions must fall at the cutoff too, if not significantly: untrained twins
# predict worse than nothing at times, and a model that predicts nothing then gains on them.
OWN_LEVEL = 0.2

# What a model knows of dates moves with them. Whoever reads the date or the past predicts the drift
# of a target that drifts, and more of it on the longer side of a cutoff: a contrast tells nothing
# where less than this part of it is left when means over a few weeks are taken out, and what is
# left is no contrast by itself.
BRIEF_PART = 0.5
BRIEF_LEVEL = 0.05

CHANNEL_WORDS: dict[str, str] = {
    "common": "what all entities do together on a date",
    "entity": "how entities differ on a date",
}


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """All that a verdict looks at, for one model.

    Attributes:
        cutoff: ISO date, or ``None`` where none was stated.
        hopeless: reasons why the whole panel is too small.
        untested: channels left out, with the reason.
        said_by_features: share of a tested channel's target that the features hold, if nearly all.
        sessions_before, sessions_after: the cutoff, with embedded rows; 0 without a cutoff.
        min_sessions_a_side: least number of either.
        level: of the tests.
        skill_p: adjusted p-value by tested channel.
        skill_test: ``"shifted dates"`` or ``"walk-forward"``.
        too_few_shifts: reason why shifted dates cannot reach ``level``, or "".
        skill_detectable: share of var(y) of the least skill that would have been seen with 80%
            probability.
        skill_lasting: (correlation, median of shifted dates) of channels whose predictions meet
            targets of any dates almost as well: what lasts, not what happens on a date.
        contrast_p: Holm-adjusted p-value by channel; empty where there was no contrast.
        contrast_own_p: p-value of the contrast of the model's predictions alone, by channel.
        contrast_share, contrast_detectable: share of var(y); ``contrast_before``: the gain before
            the cutoff.
        contrast_brief: what is left of the contrast within runs of dates, likewise.
        contrast_failed: why a channel has no contrast.
        recall: (significant before, significant after); ``None`` without a probe on either side.
        r2_negative: both arms below zero.
    """

    cutoff: str | None
    level: float
    min_sessions_a_side: int
    sessions_before: int = 0
    sessions_after: int = 0
    hopeless: tuple[str, ...] = ()
    untested: dict[Channel, str] = field(default_factory=dict)
    said_by_features: dict[Channel, float] = field(default_factory=dict)
    skill_p: dict[Channel, float] = field(default_factory=dict)
    skill_test: str = "shifted dates"
    too_few_shifts: str = ""
    skill_detectable: dict[Channel, float] = field(default_factory=dict)
    skill_lasting: dict[Channel, tuple[float, float]] = field(default_factory=dict)
    contrast_p: dict[Channel, float] = field(default_factory=dict)
    contrast_own_p: dict[Channel, float] = field(default_factory=dict)
    contrast_share: dict[Channel, float] = field(default_factory=dict)
    contrast_before: dict[Channel, float] = field(default_factory=dict)
    contrast_detectable: dict[Channel, float] = field(default_factory=dict)
    contrast_brief: dict[Channel, Brief | None] = field(default_factory=dict)
    contrast_failed: dict[Channel, str] = field(default_factory=dict)
    recall: tuple[bool, bool] | None = None
    r2_negative: bool = False


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """The verdict with its reasons, as page one prints them."""

    verdict: Verdict
    summary: tuple[str, ...]
    channels: tuple[Channel, ...] = ()
    share_of_r2: float | None = None
    cautions: tuple[str, ...] = ()


def judge(evidence: Evidence) -> Judgement:
    """Apply the rule of docs/audit.md."""
    cautions = list(_cautions(evidence))
    if evidence.hopeless:
        return Judgement(
            verdict="too_little_data", summary=evidence.hopeless, cautions=tuple(cautions)
        )
    if evidence.recall == (True, False):
        return Judgement(
            verdict="knows_the_future",
            summary=(
                (
                    "The model states what markets did on dates before its cutoff, and not on "
                    "dates after it."
                ),
            ),
            cautions=tuple(cautions),
        )
    reason = _unidentified(evidence)
    if reason:
        return Judgement(verdict="not_identified", summary=(reason,), cautions=tuple(cautions))
    short = _short_side(evidence)
    if short:
        return Judgement(verdict="too_little_data", summary=(short,), cautions=tuple(cautions))
    significant: tuple[Channel, ...] = tuple(
        channel for channel, p in evidence.contrast_p.items() if p <= evidence.level
    )
    guilty = tuple(channel for channel in significant if not _excuse(evidence, channel))
    cautions += [
        f"In the {channel} channel the model did better against its reference before its cutoff "
        f"than after it, by {evidence.contrast_share[channel]:.2g} of the target's variance "
        f"(p = {evidence.contrast_p[channel]:.2g}), which is not called knowledge of the future: "
        f"{_excuse(evidence, channel)}."
        for channel in significant
        if channel not in guilty
    ]
    if guilty:
        return _knows(evidence, guilty, cautions)
    skilled: tuple[Channel, ...] = tuple(
        channel for channel, p in evidence.skill_p.items() if p <= evidence.level
    )
    unseen = tuple(channel for channel in skilled if channel in evidence.contrast_failed)
    if unseen:
        return _undecided(evidence, unseen, cautions)
    if skilled:
        return _skill(evidence, skilled, cautions)
    if evidence.too_few_shifts:
        return Judgement(
            verdict="too_little_data",
            summary=(evidence.too_few_shifts,),
            cautions=tuple(cautions),
        )
    if not evidence.skill_p:
        reasons = tuple(_untested(evidence))
        rest = tuple(caution for caution in cautions if caution not in reasons)
        return Judgement(verdict="too_little_data", summary=reasons, cautions=rest)
    seen = ", ".join(
        f"{share:.2g} in the {channel} channel"
        for channel, share in evidence.skill_detectable.items()
    )
    return Judgement(
        verdict="no_detectable_skill",
        summary=(
            (
                "The embedding predicts nothing that could be told from chance "
                f"({evidence.skill_test})."
            ),
            f"Predictions of this share of the target's variance would have been seen: {seen}.",
            *(
                f"In the {channel} channel predictions correlate {value:.2f} with the target, and "
                f"{median:.2f} with targets of other dates: they hold what lasts, such as which "
                "entity a row is of, and not what happens on a date."
                for channel, (value, median) in evidence.skill_lasting.items()
            ),
        ),
        cautions=tuple(cautions),
    )


def excuse(share: float, *, before: float, own_p: float, brief: Brief | None = None) -> str:
    """Why a significant contrast of ``share`` of var(y) is no claim, or ""."""
    if share < LEAST_SHARE:
        return f"it is less than {LEAST_SHARE:g}"
    if before < min(LEAST_SHARE, BEFORE_PART * share):
        return (
            f"the gain before the cutoff is {before:.2g}: the model did worse after it, not well "
            "before"
        )
    if brief is not None and brief.part < BRIEF_PART:
        by_itself = brief.p_value <= BRIEF_LEVEL and brief.part * share >= LEAST_SHARE
        if not by_itself:
            return (
                f"{1 - brief.part:.0%} of it lies in what lasts longer than {brief.run} sessions, "
                "such as a trend, which a model follows that knows the date or the past"
            )
    if own_p >= OWN_LEVEL:
        return f"the model's own predictions do not fall at the cutoff (p = {own_p:.2g})"
    return ""


def _excuse(evidence: Evidence, channel: Channel) -> str:
    share = evidence.contrast_share[channel]
    return excuse(
        share,
        before=evidence.contrast_before.get(channel, share),
        own_p=evidence.contrast_own_p.get(channel, 0.0),
        brief=evidence.contrast_brief.get(channel),
    )


def _unidentified(evidence: Evidence) -> str:
    if evidence.recall is not None:
        return ""
    if evidence.cutoff is None:
        return (
            "No knowledge cutoff was stated for this model, so its skill before and after it "
            "cannot be compared, and no recall probe was given."
        )
    if evidence.sessions_after == 0:
        return (
            f"Every date of the panel lies on or before the model's cutoff ({evidence.cutoff}), "
            "and no recall probe was given: skill and knowledge of the future look the same here."
        )
    return ""


def _short_side(evidence: Evidence) -> str:
    if evidence.cutoff is None or evidence.recall is not None:
        return ""
    least = evidence.min_sessions_a_side
    # With no date before the cutoff nothing in the panel can have been known: no contrast needed.
    for side, count in (
        ("before", evidence.sessions_before or least),
        ("after", evidence.sessions_after),
    ):
        if count < least:
            return (
                f"{count} sessions lie {side} the model's cutoff ({evidence.cutoff}); at least "
                f"{least} are needed on either side, with fewer the test claims too much."
            )
    return ""


def _knows(evidence: Evidence, guilty: tuple[Channel, ...], cautions: list[str]) -> Judgement:
    share = sum(evidence.contrast_share[channel] for channel in guilty)
    sentences = [
        f"Before its cutoff ({evidence.cutoff}) the model predicts {CHANNEL_WORDS[channel]} better "
        f"than after it, by {evidence.contrast_share[channel]:.3f} of the target's variance "
        f"(p = {evidence.contrast_p[channel]:.2g})."
        for channel in guilty
    ]
    cautions.append("Honest skill that fades at the cutoff for other reasons would look the same.")
    return Judgement(
        verdict="knows_the_future",
        summary=tuple(sentences),
        channels=guilty,
        share_of_r2=share,
        cautions=tuple(cautions),
    )


def _undecided(evidence: Evidence, channels: tuple[Channel, ...], cautions: list[str]) -> Judgement:
    """Skill, and too little data to tell it from knowledge of the future."""
    return Judgement(
        verdict="too_little_data",
        summary=tuple(
            f"The embedding predicts {CHANNEL_WORDS[channel]} ({evidence.skill_test}, "
            f"p = {evidence.skill_p[channel]:.2g}), but whether it does so only up to its cutoff "
            f"({evidence.cutoff}) cannot be tested: {evidence.contrast_failed[channel]}."
            for channel in channels
        ),
        channels=channels,
        cautions=tuple(cautions),
    )


def _skill(evidence: Evidence, skilled: tuple[Channel, ...], cautions: list[str]) -> Judgement:
    words = " and ".join(CHANNEL_WORDS[channel] for channel in skilled)
    sentences = [
        (
            f"The embedding predicts {words} beyond the numeric features ({evidence.skill_test}, "
            f"p = {min(evidence.skill_p[channel] for channel in skilled):.2g})."
        )
    ]
    if evidence.contrast_p:
        seen = ", ".join(
            f"{evidence.contrast_detectable[channel]:.2g} ({channel})"
            for channel in evidence.contrast_p
            if evidence.contrast_detectable[channel] > 0
        )
        fallen = any(p <= evidence.level for p in evidence.contrast_p.values())
        sentences.append(
            (
                "It does so less after its cutoff than before, though not so that it is called "
                "knowledge of the future: the cautions say why."
                if fallen
                else "It does so after its cutoff as before: no sign of the future."
            )
            + (
                " A fall at the cutoff of this share of the target's variance would have been "
                f"seen: {seen}."
                if seen
                else ""
            )
        )
        sentences += [
            f"In the {channel} channel it predicts nothing on either side of the cutoff."
            for channel in evidence.contrast_p
            if evidence.contrast_detectable[channel] == 0
        ]
    elif evidence.recall is not None:
        sentences.append("The recall probe gives no sign of the future.")
    else:
        sentences.append(
            f"Every date lies after the model's stated cutoff ({evidence.cutoff}): if that is "
            "right, it cannot know one."
        )
    return Judgement(
        verdict="skill", summary=tuple(sentences), channels=skilled, cautions=tuple(cautions)
    )


def _untested(evidence: Evidence) -> list[str]:
    return [
        f"The {channel} channel is untested: {why}." for channel, why in evidence.untested.items()
    ]


def _cautions(evidence: Evidence) -> list[str]:
    cautions = _untested(evidence)
    cautions += [
        f"The {channel} channel has no contrast at the cutoff: {why}."
        for channel, why in evidence.contrast_failed.items()
    ]
    cautions += [
        f"The numeric features hold {share:.4%} of the {channel} channel's target: what little is "
        "left was tested. Features that know the target, or are as many as the dates, do that."
        for channel, share in evidence.said_by_features.items()
    ]
    if evidence.r2_negative:
        cautions.append(
            "R2 is negative in both arms: a premium between them means less wrong, not right."
        )
    return cautions
