"""The rule, line by line: which evidence gives which word."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.audit.verdict import Evidence, judge

NOTHING = Evidence(
    cutoff="2020-01-01",
    level=0.05,
    min_sessions_a_side=120,
    sessions_before=500,
    sessions_after=300,
    skill_p={"common": 0.4, "entity": 0.6},
    skill_detectable={"common": 0.001, "entity": 0.002},
    contrast_p={"common": 0.5, "entity": 0.9},
    contrast_share={"common": 0.01, "entity": 0.0},
    contrast_detectable={"common": 0.012, "entity": 0.007},
)
SKILL = replace(NOTHING, skill_p={"common": 0.01, "entity": 0.6})
KNOWS = replace(SKILL, contrast_p={"common": 0.01, "entity": 0.9})


@pytest.mark.parametrize(
    ("evidence", "verdict"),
    [
        (NOTHING, "no_detectable_skill"),
        (SKILL, "skill"),
        (KNOWS, "knows_the_future"),
        (replace(KNOWS, skill_p={"common": 0.9, "entity": 0.9}), "knows_the_future"),
        (replace(SKILL, r2_negative=True), "skill"),
        (replace(KNOWS, hopeless=("30 dates",)), "too_little_data"),
        (replace(KNOWS, sessions_after=119), "too_little_data"),
        (replace(KNOWS, sessions_before=119), "too_little_data"),
        (replace(KNOWS, sessions_after=120), "knows_the_future"),
        (replace(KNOWS, sessions_after=0, contrast_p={}), "not_identified"),
        (replace(SKILL, cutoff=None, contrast_p={}), "not_identified"),
        (replace(SKILL, sessions_before=0, contrast_p={}), "skill"),
        (replace(NOTHING, sessions_before=0, contrast_p={}), "no_detectable_skill"),
        (
            replace(NOTHING, sessions_after=0, contrast_p={}, recall=(True, False)),
            "knows_the_future",
        ),
        (replace(SKILL, sessions_after=0, contrast_p={}, recall=(False, False)), "skill"),
        (replace(SKILL, sessions_after=0, contrast_p={}, recall=(True, True)), "skill"),
        (replace(NOTHING, too_few_shifts="12 shifts"), "too_little_data"),
        (replace(KNOWS, too_few_shifts="12 shifts"), "knows_the_future"),
        (
            replace(SKILL, contrast_p={"entity": 0.9}, contrast_failed={"common": "4 blocks"}),
            "too_little_data",
        ),
        (
            replace(SKILL, contrast_p={"common": 0.5}, contrast_failed={"entity": "4 blocks"}),
            "skill",
        ),
        (
            replace(NOTHING, contrast_p={}, contrast_failed={"common": "4 blocks"}),
            "no_detectable_skill",
        ),
        (replace(NOTHING, skill_p={}, untested={"common": "90 dates"}), "too_little_data"),
    ],
)
def test_evidence_gives_the_verdict(evidence, verdict):
    assert judge(evidence).verdict == verdict


def test_a_claim_names_channel_share_and_what_looks_the_same():
    judgement = judge(KNOWS)
    assert judgement.channels == ("common",)
    assert judgement.share_of_r2 == pytest.approx(0.01)
    assert any("fades at the cutoff" in caution for caution in judgement.cautions)


def test_no_skill_says_what_would_have_been_seen():
    assert "0.001 in the common channel" in " ".join(judge(NOTHING).summary)


def test_skill_without_a_fall_says_no_sign_of_the_future():
    assert "no sign of the future" in " ".join(judge(SKILL).summary)
    before_nothing = replace(SKILL, sessions_before=0, contrast_p={})
    assert "cannot know one" in " ".join(judge(before_nothing).summary)


def test_a_reason_is_given_once():
    judgement = judge(replace(NOTHING, skill_p={}, untested={"common": "90 dates"}))
    assert judgement.summary == ("The common channel is untested: 90 dates.",)
    assert judgement.cautions == ()


def test_less_wrong_is_not_right():
    words = judge(replace(NOTHING, r2_negative=True)).cautions
    assert any("less wrong, not right" in caution for caution in words)


def test_a_significant_trifle_is_no_claim():
    """A share too small to be called is printed as a caution, and the rest of the rule goes on."""
    trifle = replace(KNOWS, contrast_share={"common": 0.0011, "entity": 0.0})
    judgement = judge(trifle)
    assert judgement.verdict == "skill"
    assert any("less than 0.002" in caution for caution in judgement.cautions)
    assert not any("no sign of the future" in sentence for sentence in judgement.summary)
    assert judge(replace(trifle, skill_p={"common": 0.9})).verdict == "no_detectable_skill"


def test_worse_than_nothing_after_the_cutoff_is_no_knowledge_before_it():
    judgement = judge(replace(KNOWS, contrast_before={"common": 0.0019, "entity": 0.0}))
    assert judgement.verdict == "skill"
    assert any("not well before" in caution for caution in judgement.cautions)
    gained = replace(KNOWS, contrast_before={"common": 0.0021, "entity": 0.0})
    assert judge(gained).verdict == "knows_the_future"
    small = replace(gained, contrast_share={"common": 0.003}, contrast_before={"common": 0.0016})
    assert judge(small).verdict == "knows_the_future"


def test_a_gain_on_twins_that_predict_worse_than_nothing_is_no_claim():
    """The model's own predictions must fall at the cutoff too."""
    judgement = judge(replace(KNOWS, contrast_own_p={"common": 0.4, "entity": 0.9}))
    assert judgement.verdict == "skill"
    assert any("do not fall at the cutoff" in caution for caution in judgement.cautions)
    fallen = replace(KNOWS, contrast_own_p={"common": 0.1, "entity": 0.9})
    assert judge(fallen).verdict == "knows_the_future"


def test_a_channel_that_predicts_nothing_is_not_said_to_have_shown_a_fall_of_zero():
    detectable = {"common": 0.012, "entity": 0.0}
    words = " ".join(judge(replace(SKILL, contrast_detectable=detectable)).summary)
    assert "would have been seen: 0.012 (common)." in words
    assert "In the entity channel it predicts nothing on either side" in words
