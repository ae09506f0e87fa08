"""The audit end to end: five verdicts, refusals, what is paired and what is adjusted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from headrace.audit import (
    AuditConfig,
    EmbeddingSource,
    from_dict,
    make_panel,
    run_audit,
    to_dict,
)
from headrace.audit.config import parse_date
from headrace.errors import ConfigError, DataError


@pytest.fixture(scope="module")
def leaky(small):
    return small(leak=0.06, seed=1, num_twins=4)


@pytest.fixture(scope="module")
def clean(small):
    return small(seed=4)


def audit(drawn, config, cutoff=None, **options):
    cutoff = drawn.cutoff if cutoff is None else cutoff
    result = run_audit(drawn.panel, {"m": drawn.embedding}, {"m": cutoff}, config=config, **options)
    return result.models[0]


def test_knowledge_before_the_cutoff_only_is_knowledge_of_the_future(leaky, quick):
    model = audit(leaky, quick, twins=leaky.twins)
    assert model.verdict == "knows_the_future"
    assert set(model.channels) <= {"common", "entity"}
    assert 0.005 < model.share_of_r2 < 0.2
    contrast = model.contamination["entity"].contrast
    assert contrast.value > 0
    assert contrast.p_adjusted >= contrast.p_value
    assert model.contamination["entity"].reference == "mean of 4 untrained twins"


def test_nothing_known_is_no_detectable_skill(clean, quick):
    assert audit(clean, quick).verdict == "no_detectable_skill"


def test_skill_on_every_date_is_skill(small, quick):
    model = audit(small(skill=0.06, seed=3), quick)
    assert model.verdict == "skill"
    assert model.skill["entity"].p_adjusted <= 0.05


def test_no_dates_after_the_cutoff_is_not_identified_however_much_is_known(leaky, quick):
    assert audit(leaky, quick, cutoff="2030-01-01").verdict == "not_identified"
    result = run_audit(leaky.panel, {"m": leaky.embedding}, config=quick)
    assert result.models[0].verdict == "not_identified"


def test_few_dates_are_too_little_whatever_the_figures_say(leaky, small, quick):
    late = str(leaky.panel.sessions[-100])[:10]
    assert audit(leaky, quick, cutoff=late).verdict == "too_little_data"
    tiny = small(num_sessions=40, rows_per_entity=20, leak=0.2)
    model = audit(tiny, quick)
    assert model.verdict == "too_little_data"
    assert model.skill == {}
    assert "40 dates" in model.summary[0]


def test_a_cutoff_before_every_date_leaves_skill_or_none(small, quick):
    assert audit(small(skill=0.06, seed=3), quick, cutoff="1999-12-31").verdict == "skill"


def test_without_the_full_matrix_shifts_are_refused_with_the_reason(small, quick):
    drawn = small(skill=0.06, seed=3)
    rows = drawn.panel.embedded_rows
    sampled = replace(
        drawn.panel,
        **{
            name: getattr(drawn.panel, name)[rows]
            for name in ("entity", "session", "label_start", "label_end", "y", "features")
        },
        embedded=np.ones(len(rows), dtype=bool),
    )
    result = run_audit(sampled, {"m": drawn.embedding}, {"m": drawn.cutoff}, config=quick)
    model = result.models[0]
    assert any("Shifted-date tests are refused" in warning for warning in result.warnings)
    assert model.skill["entity"].null is None
    assert "refused" in model.skill["entity"].note
    assert "walk_forward" in model.skill["entity"].protocol
    assert model.verdict == "skill"
    leaky = small(leak=0.06, seed=1)
    sampled = replace(sampled, y=leaky.panel.y[leaky.panel.embedded_rows])
    result = run_audit(sampled, {"m": leaky.embedding}, {"m": leaky.cutoff}, config=quick)
    assert result.models[0].verdict == "knows_the_future"


def test_the_same_audit_gives_the_same_result(clean, quick):
    first, second = (
        to_dict(run_audit(clean.panel, {"m": clean.embedding}, {"m": clean.cutoff}, config=quick))
        for _ in range(2)
    )
    assert first == second


def test_the_whole_result_survives_the_file(leaky):
    config = AuditConfig(num_shifts=39)
    later = str(leaky.panel.sessions[300])[:10]
    result = run_audit(
        leaky.panel,
        {"base": leaky.embedding, "trained": leaky.twins["twin 0"], "third": leaky.twins["twin 1"]},
        {"base": leaky.cutoff, "trained": later, "third": "2015-12-31"},
        twins={"a": leaky.twins["twin 2"], "b": leaky.twins["twin 3"]},
        reductions=[("base", "trained")],
        config=config,
    )
    assert from_dict(to_dict(result)) == result
    base = result.model("base")
    assert base.evaluation.premium.null.num_draws == 39
    assert base.evaluation.premium.low is None, "no interval of a premium holds up"
    assert base.evaluation.premium.twins.num_draws == 2
    assert [row.label for row in base.walk_forward][-1] == "pooled"
    assert [row.embargo_sessions for row in base.embargo] == [0, 5, 20]
    assert {period.side for period in base.periods} == {"before", "gap", "after"}
    assert "fewer than 4 twins" in base.contamination["entity"].reference
    reduction = result.reductions[0]
    assert reduction.skill["entity"].value > 0
    assert reduction.skill["entity"].low < reduction.skill["entity"].value
    pooled = [result.model(name).walk_forward[-1].r2.value for name in ("base", "trained")]
    assert reduction.walk_forward.value == pytest.approx(pooled[0] - pooled[1])
    off = [result.model(name).embargo[1].r2_off.value for name in ("base", "trained")]
    assert reduction.embargo[1].r2_off.value == pytest.approx(off[0] - off[1])
    assert set(result.slope) == {"common", "entity", "premium"}


def test_reduction_of_a_model_by_itself_is_exactly_nothing(clean):
    result = run_audit(
        clean.panel,
        {"a": clean.embedding, "b": clean.embedding.copy()},
        config=AuditConfig(num_shifts=39),
        reductions=[("a", "b")],
    )
    reduction = result.reductions[0]
    for figure in (*reduction.skill.values(), reduction.premium):
        assert figure.value == 0
        assert figure.p_value == 1
    assert [row.embargo_sessions for row in reduction.embargo] == [0, 5, 20]
    rows = [figure for row in reduction.embargo for figure in (row.r2_off, row.premium)]
    assert {figure.value for figure in (reduction.walk_forward, *rows)} == {0.0}


def test_more_models_never_make_a_claim_easier(leaky, quick):
    alone = audit(leaky, quick).contamination["entity"].contrast
    many = {f"x{k}": twin for k, twin in enumerate(leaky.twins.values())} | {"m": leaky.embedding}
    result = run_audit(leaky.panel, many, dict.fromkeys(many, leaky.cutoff), config=quick)
    crowded = result.model("m").contamination["entity"].contrast
    assert crowded.p_value == alone.p_value
    assert crowded.p_adjusted >= alone.p_adjusted


def test_a_point_in_time_model_can_be_the_reference(leaky, quick):
    result = run_audit(
        leaky.panel,
        {"m": leaky.embedding, "dated": leaky.twins["twin 0"]},
        {"m": leaky.cutoff, "dated": leaky.cutoff},
        reference="dated",
        config=quick,
    )
    assert result.model("m").contamination["entity"].reference == "model dated"
    assert result.model("dated").contamination["entity"].reference == "the constant"
    assert result.model("m").verdict == "knows_the_future"


def test_vectors_for_every_panel_row_are_cut_to_the_embedded_ones(clean, quick):
    everywhere = np.zeros((clean.panel.num_rows, clean.embedding.shape[1]), dtype=np.float32)
    everywhere[clean.panel.embedded_rows] = clean.embedding
    cut = run_audit(clean.panel, {"m": everywhere}, {"m": clean.cutoff}, config=quick)
    whole = run_audit(clean.panel, {"m": clean.embedding}, {"m": clean.cutoff}, config=quick)
    assert cut.models[0].skill == whole.models[0].skill


def test_files_and_callables_are_read_when_their_turn_comes(clean, quick, tmp_path):
    np.save(tmp_path / "m.npy", clean.embedding)
    asked = []

    def loader(rows):
        asked.append(len(rows))
        return clean.embedding

    by_file, by_call = (
        run_audit(clean.panel, {"m": source}, {"m": clean.cutoff}, config=quick).models[0]
        for source in (tmp_path / "m.npy", loader)
    )
    assert asked == [len(clean.embedding)]
    assert by_file.skill == by_call.skill
    assert by_file.embedding.sha256 == by_call.embedding.sha256


def broken(values, row):
    values = values.copy()
    values[row, 0] = np.nan
    return values


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda v: v[:-7], "rows .* have no vector"),
        (lambda v: np.concatenate([v, v[:3]]), "vectors 2400 to 2402 have no panel row"),
        (lambda v: broken(v, 5), "missing or infinite in panel row"),
        (np.ones_like, "the same vector"),
        (lambda v: v[:, 0], "shape"),
        (lambda v: v[:, :0], "shape"),
        (lambda v: v.astype(np.int64), "type int64"),
        (lambda v: v.T.copy(), r"(?s)has 24 rows.*transposed"),
    ],
)
def test_vectors_that_do_not_match_are_refused_by_row(clean, quick, change, words):
    with pytest.raises(DataError, match=words) as caught:
        run_audit(clean.panel, {"m": change(clean.embedding)}, config=quick)
    assert caught.value.remedy


@pytest.mark.parametrize(
    "change",
    [
        np.asfortranarray,
        lambda v: v.astype(">f4"),
        lambda v: v.astype(np.float64),
    ],
)
def test_the_layout_of_a_file_changes_no_figure(clean, quick, tmp_path, change):
    np.save(tmp_path / "m.npy", change(clean.embedding))
    plain, other = (
        run_audit(clean.panel, {"m": source}, {"m": clean.cutoff}, config=quick).models[0]
        for source in (clean.embedding, tmp_path / "m.npy")
    )
    assert other.skill == plain.skill
    assert other.contamination == plain.contamination


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"embeddings": {}}, "no embeddings"),
        ({"cutoffs": {"other": "2020-01-01"}}, "'other', which has no embeddings"),
        ({"cutoffs": {"m": "soon"}}, "which is no date"),
        ({"cutoffs": {"m": "now"}}, "which is no date"),
        ({"cutoffs": {"m": "today"}}, "which is no date"),
        ({"cutoffs": {"m": "2020-W10"}}, "which is no date"),
        ({"cutoffs": {"m": "20201340"}}, "which is no date"),
        ({"cutoffs": {"m": "03/04/2020"}}, "which is no date"),
        ({"cutoffs": {"m": "2020-01-01 09:00+09:00"}}, "with a time zone"),
        ({"cutoffs": {"m": "2020-01-01T09:00:00+09:00"}}, "with a time zone"),
        ({"cutoffs": {"m": "2020-01-01T09:00Z"}}, "with a time zone"),
        ({"reference": "other"}, "reference 'other'"),
        ({"reductions": [("m", "other")]}, "'other' has no embeddings"),
        ({"twins": {"m": np.zeros((1, 1))}}, "both a model and a twin"),
    ],
)
def test_names_that_do_not_match_are_refused(clean, quick, options, words):
    embeddings = options.pop("embeddings", {"m": clean.embedding})
    with pytest.raises(ConfigError, match=words):
        run_audit(clean.panel, embeddings, config=quick, **options)


def test_an_empty_test_period_and_too_few_entities_are_refused(clean, small):
    with pytest.raises(DataError, match="test period is empty"):
        run_audit(clean.panel, {"m": clean.embedding}, config=AuditConfig(split_date="2030-01-01"))
    few = small(num_entities=4, rows_per_entity=300)
    with pytest.raises(DataError, match="4 entities"):
        run_audit(few.panel, {"m": few.embedding})


def test_embeddings_of_different_stacks_are_compared_only_when_forced(clean, quick):
    sources = {
        name: EmbeddingSource(values=clean.embedding, stack={"torch": version})
        for name, version in (("a", "2.5"), ("b", "2.10"))
    }
    with pytest.raises(ConfigError, match="2 different stacks"):
        run_audit(clean.panel, sources, config=quick)
    forced = run_audit(clean.panel, sources, config=replace(quick, allow_mixed_stacks=True))
    assert forced.mixed_stacks
    assert any("different stacks" in warning for warning in forced.warnings)


@pytest.mark.parametrize(
    ("text", "last"),
    [
        ("20200630", "2020-06-30T23:59:59.999999"),
        ("2020/6/30", "2020-06-30T23:59:59.999999"),
        (" 2020-06-30", "2020-06-30T23:59:59.999999"),
        ("2020-06", "2020-06-30T23:59:59.999999"),
        ("2020", "2020-12-31T23:59:59.999999"),
        ("2020-06-30 15:00", "2020-06-30T15:00"),
        ("2020-06-30T15", "2020-06-30T15:00"),
    ],
)
def test_a_cutoff_is_the_end_of_what_it_names(text, last):
    """20200630 once was a year, which no panel reaches: every model was ``not_identified``."""
    assert parse_date(text, "cutoff") == np.datetime64(last)


@pytest.mark.parametrize(
    "bad",
    [
        {"num_shifts": 3},
        {"num_blocks": 2},
        {"level": 0.0},
        {"embargoes": (-1,)},
        {"split_date": "yesterday"},
    ],
)
def test_settings_that_cannot_work_are_refused(bad):
    with pytest.raises(ConfigError):
        AuditConfig(**bad)


def overlapping(num_sessions, horizon, seed=0, num_entities=8):
    """Daily rows whose labels cover ``horizon`` days, and vectors that know them up to a cutoff."""
    rng = np.random.default_rng(seed)
    moves = rng.standard_t(4, (num_entities, num_sessions + horizon))
    moves += rng.standard_t(4, num_sessions + horizon)
    paths = np.concatenate([np.zeros((num_entities, 1)), moves.cumsum(axis=1)], axis=1)
    labels = (paths[:, horizon:] - paths[:, :-horizon])[:, 1 : num_sessions + 1]
    unit, session = np.divmod(np.arange(num_entities * num_sessions), num_sessions)
    dates = np.datetime64("2015-01-01") + np.arange(num_sessions + horizon + 1)
    panel = make_panel(
        entity=unit.astype(str), date=dates[session], label_start=dates[session + 1],
        label_end=dates[session + horizon], y=labels.ravel(),
    )  # fmt: skip
    cutoff = int(0.6 * num_sessions)
    values = rng.standard_normal((num_entities * num_sessions, 8))
    known = session < cutoff
    values[known, :2] += 0.5 * (panel.y / panel.y.std())[known, None]
    return panel, values, str(dates[cutoff - 1])


def test_overlapping_labels_leave_enough_blocks_to_find_a_leak(quick):
    panel, values, cutoff = overlapping(760, 11)
    model = run_audit(panel, {"m": values}, {"m": cutoff}, config=quick).models[0]
    assert model.verdict == "knows_the_future"
    assert model.contamination["entity"].contrast.num_blocks < 20


def test_a_known_stretch_stands_out_among_its_own_dates(quick):
    """What docs/audit.md advises: the whole panel hides it, the dates from its start do not."""
    panel, values, cutoff = overlapping(700, 1)
    last = panel.session_of(np.datetime64(cutoff))
    forgotten = panel.session < last - 140
    values[forgotten] = np.random.default_rng(5).standard_normal(values[forgotten].shape)
    whole = run_audit(panel, {"m": values}, {"m": cutoff}, config=quick).models[0]
    assert whole.verdict != "knows_the_future"
    kept = make_panel(
        entity=panel.entities[panel.entity][~forgotten],
        date=panel.sessions[panel.session][~forgotten],
        label_start=panel.label_start[~forgotten],
        label_end=panel.label_end[~forgotten],
        y=panel.y[~forgotten],
    )
    part = run_audit(kept, {"m": values[~forgotten]}, {"m": cutoff}, config=quick).models[0]
    assert part.verdict == "knows_the_future"


def test_a_leak_that_cannot_be_contrasted_is_not_called_honest_skill(quick):
    """With too few blocks at the cutoff, skill that may end there must not read as innocence."""
    panel, values, cutoff = overlapping(760, 15)
    model = run_audit(panel, {"m": values}, {"m": cutoff}, config=quick).models[0]
    assert model.verdict == "too_little_data"
    assert "cannot be tested" in model.summary[0]
    assert "date blocks" in model.summary[0]


UNITS = {
    "targets": lambda p, e: (replace(p, y=np.ldexp(p.y, 400)), e),
    "tiny targets": lambda p, e: (replace(p, y=np.ldexp(p.y, -400)), e),
    "features": lambda p, e: (replace(p, features=p.features * [1e200, 1e-200, 1e-6]), e),
    "embedding": lambda p, e: (p, np.ldexp(e.astype(np.float64), 700)),
    "tiny embedding": lambda p, e: (p, np.ldexp(e.astype(np.float64), -700)),
    "constant dimension": lambda p, e: (p, np.column_stack([e, np.full(len(e), np.float32(0.1))])),
    "constant feature": lambda p, e: (
        replace(
            p,
            features=np.column_stack([p.features, np.full(p.num_rows, 0.1)]),
            feature_names=(*p.feature_names, "constant"),
        ),
        e,
    ),
}


@pytest.mark.parametrize("what", UNITS)
def test_no_figure_depends_on_units_or_on_what_does_not_vary(small, quick, what):
    drawn = small(leak=0.05, feature_skill=0.1)
    panel, values = UNITS[what](drawn.panel, drawn.embedding)
    config = replace(quick, tables=True)
    cutoffs = {"m": drawn.cutoff}
    plain = run_audit(drawn.panel, {"m": drawn.embedding}, cutoffs, config=config).models[0]
    moved = run_audit(panel, {"m": values}, cutoffs, config=config).models[0]
    assert moved.verdict == plain.verdict == "knows_the_future"
    for channel in ("common", "entity"):
        was, now = plain.contamination[channel], moved.contamination[channel]
        assert now.contrast.value == pytest.approx(was.contrast.value, rel=1e-6)
        assert now.contrast.p_value == pytest.approx(was.contrast.p_value, rel=1e-4)
        assert moved.skill[channel].value == pytest.approx(plain.skill[channel].value, rel=1e-6)
    assert moved.evaluation.r2_on.value == pytest.approx(plain.evaluation.r2_on.value, rel=1e-6)


def test_half_precision_of_large_values_does_not_overflow(small, quick):
    drawn = small(leak=0.1, num_twins=4)
    big = (drawn.embedding.astype(np.float64) * 9000).astype(np.float16)
    twins = {name: (vectors * 9000).astype(np.float16) for name, vectors in drawn.twins.items()}
    config = replace(quick, twin_max_dimension=12)
    result = run_audit(drawn.panel, {"m": big}, {"m": drawn.cutoff}, twins=twins, config=config)
    assert result.models[0].verdict == "knows_the_future"


def test_a_channel_whose_target_does_not_vary_is_untested(small, quick):
    drawn = small(leak=0.1)
    panel = drawn.panel
    means = np.bincount(panel.session, panel.y) / np.bincount(panel.session)
    demeaned = replace(panel, y=panel.y - means[panel.session])
    model = run_audit(demeaned, {"m": drawn.embedding}, {"m": drawn.cutoff}, config=quick).models[0]
    assert list(model.skill) == list(model.contamination) == ["entity"]
    assert "common channel is untested: its target does not vary" in model.cautions[0]
    assert model.verdict == "knows_the_future"
    known = replace(panel, features=panel.y[:, None], feature_names=("y",))
    model = run_audit(known, {"m": drawn.embedding}, {"m": drawn.cutoff}, config=quick).models[0]
    assert model.verdict == "too_little_data"


def test_features_that_hold_the_target_are_said(small, quick):
    drawn = small(seed=4)
    panel = drawn.panel
    noise = np.random.default_rng(1).standard_normal(panel.num_rows)
    known = (panel.y + 0.01 * panel.y.std() * noise)[:, None]
    leaking = replace(panel, features=known, feature_names=("known",))
    model = run_audit(leaking, {"m": drawn.embedding}, {"m": drawn.cutoff}, config=quick).models[0]
    said = [caution for caution in model.cautions if "numeric features hold 99.9" in caution]
    assert len(said) == 2
    assert not any("numeric features hold" in text for text in audit(drawn, quick).cautions)


def test_the_split_lies_among_the_dates_that_have_a_vector(small, quick):
    drawn = small(leak=0.1)
    panel = drawn.panel
    early = panel.embedded & (panel.session < 0.6 * panel.num_sessions)
    kept = drawn.embedding[early[panel.embedded_rows]]
    result = run_audit(replace(panel, embedded=early), {"m": kept}, {}, config=quick)
    assert result.settings["split_date"] < panel.date_text(int(0.6 * panel.num_sessions))


def test_what_lasts_is_told_from_what_happens_on_a_date(small, quick):
    drawn = small(entity_effect=0.3, effect_persistence=1.0, rows_per_entity=200, seed=1)
    model = audit(drawn, quick)
    assert model.verdict == "no_detectable_skill"
    assert model.skill["entity"].value > 0.1
    assert "they hold what lasts" in model.summary[2]
    assert len(audit(small(seed=4), quick).summary) == 2


def prices(known: bool, seed: int):
    """Log prices of 30 entities; vectors hold tomorrow's up to the cutoff, and today's later."""
    rng = np.random.default_rng(seed)
    shape, cutoff = (30, 420), 252
    returns = 0.02 * (np.sqrt(0.7) * rng.standard_normal(shape) + 0.55 * rng.standard_normal(420))
    today = rng.standard_normal((30, 1)) + returns.cumsum(axis=1) - returns
    stated = today + returns * (np.arange(420) < cutoff) * known
    unit, session = np.divmod(np.arange(30 * 420), 420)
    dates = np.datetime64("2015-01-01") + np.arange(421)
    panel = make_panel(
        entity=unit.astype(str), date=dates[session], label_start=dates[session],
        label_end=dates[session], y=returns.ravel(), features=today.reshape(-1, 1),
        feature_names=("log_price",),
    )  # fmt: skip
    noise = rng.standard_normal((len(unit), 6))
    level = stated.reshape(-1, 1) + 0.01 * rng.standard_normal((len(unit), 1))
    return panel, np.hstack([noise, level]), str(dates[cutoff - 1])


def test_a_leak_in_levels_is_seen_beside_a_feature_that_holds_the_level(quick):
    panel, values, cutoff = prices(known=True, seed=0)
    model = run_audit(panel, {"m": values}, {"m": cutoff}, config=quick).models[0]
    assert model.verdict == "knows_the_future"
    assert set(model.channels) == {"common", "entity"}
    verdicts = []
    for seed in range(6):
        panel, values, cutoff = prices(known=False, seed=seed)
        result = run_audit(panel, {"m": values}, {"m": cutoff}, config=quick)
        verdicts.append(result.models[0].verdict)
    assert verdicts.count("no_detectable_skill") >= 5


def test_vectors_of_another_version_of_the_panel_are_warned_of(clean, quick):
    made_for = {
        "own": clean.panel.sha256(),
        "old": replace(clean.panel, y=-clean.panel.y).sha256(),
        "unknown": None,
    }
    sources = {
        name: EmbeddingSource(values=clean.embedding, panel=panel)
        for name, panel in made_for.items()
    }
    (warning,) = run_audit(clean.panel, sources, config=quick).warnings
    assert "Vectors of old were made for another version" in warning
