"""Views: what is common, what is an entity's own, and what moves when dates are shifted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from headrace.audit.channels import channel_book, common_view, entity_view, level_view
from headrace.audit.folds import (
    chronological_plan,
    group_plan,
    purged_plan,
    seen_unseen_plan,
    walk_forward_plan,
)
from headrace.audit.synthetic import SyntheticConfig, simulate

OFFSETS = np.array([0, 17, 40], dtype=np.int64)


@pytest.fixture(scope="module")
def drawn():
    config = SyntheticConfig(
        num_entities=12, num_sessions=80, rows_per_entity=20, dimension=6, feature_skill=0.2
    )
    return simulate(config)


def test_channels_split_the_target_and_add_up(drawn):
    panel = drawn.panel
    common, entity = common_view(panel, OFFSETS), entity_view(panel, OFFSETS)
    y = panel.matrix(panel.y)
    features = panel.features.reshape(*y.shape, -1)
    mean = y.mean(axis=0) - y.mean()
    factors = features.mean(axis=0)
    factors = factors - factors.mean(axis=0)
    residual = mean - factors @ np.linalg.lstsq(factors, mean, rcond=None)[0]
    np.testing.assert_allclose(common.target, residual[common.session], atol=1e-12)
    own = y - y.mean(axis=0)
    factors = (features - features.mean(axis=0)).reshape(-1, features.shape[2])
    residual = own.ravel() - factors @ np.linalg.lstsq(factors, own.ravel(), rcond=None)[0]
    matrix = entity.targets.values_KUT[0]
    np.testing.assert_allclose(matrix, residual.reshape(own.shape), atol=1e-12)
    np.testing.assert_array_equal(entity.target, matrix[entity.unit, entity.session])


def test_a_column_is_the_whole_matrix_moved_against_the_dates(drawn):
    panel = drawn.panel
    view = entity_view(panel, OFFSETS)
    matrix = view.targets.values_KUT[0]
    block = view.targets.block(np.arange(len(view.session)), slice(None))[0]
    for column, offset in enumerate(OFFSETS):
        moved = np.roll(matrix, -offset, axis=1)
        np.testing.assert_array_equal(block[:, column], moved[view.unit, view.session])


def test_books_hold_the_embedding_of_their_channel(drawn):
    panel, values = drawn.panel, drawn.embedding.astype(float)
    rows = panel.embedded_rows
    session, unit = panel.session[rows], panel.entity[rows]
    kept = np.bincount(session, minlength=80)[session] >= 2

    def common(x):
        own = np.stack([x[unit == k].mean(axis=0) for k in range(12)])
        return np.stack([(x - own[unit])[session == t].mean(axis=0) for t in np.unique(session)])

    def within(x):
        return np.stack([x[i] - x[session == session[i]].mean(axis=0) for i in range(len(x))])[kept]

    features = panel.features[rows]
    for channel, moved in (("common", common), ("entity", within)):
        plain, factors = (x - x.mean(axis=0) for x in (moved(values), moved(features)))
        bare = replace(panel, features=np.zeros((panel.num_rows, 0)), feature_names=())
        book = channel_book(bare, values, channel)
        np.testing.assert_allclose(book.values, plain / plain.std(axis=0), atol=1e-9)
        left = plain - factors @ np.linalg.lstsq(factors, plain, rcond=None)[0]
        book = channel_book(panel, values, channel)
        np.testing.assert_allclose(book.values, left / left.std(axis=0), atol=1e-9)


def test_features_said_twice_or_by_the_embedding_leave_nothing_and_change_nothing(drawn):
    panel = drawn.panel
    values = drawn.embedding.astype(float)
    twice = replace(panel, features=np.hstack([panel.features, 3 - 2 * panel.features]))
    for channel in ("common", "entity"):
        plain = channel_book(panel, values, channel).values
        np.testing.assert_allclose(channel_book(twice, values, channel).values, plain, atol=1e-9)
        said = np.hstack([values, panel.features[panel.embedded_rows]])
        book = channel_book(panel, said, channel).values
        np.testing.assert_allclose(book[:, :6], plain, atol=1e-9)
        assert not book[:, 6:].any()


def meets(times, train, test):
    return (
        (times.begin[train, None] <= times.end[None, test])
        & (times.end[train, None] >= times.begin[None, test])
    ).any()


def test_vectors_keep_what_many_features_say(drawn):
    # Taken out of target and vectors alike, it would mix test rows with training rows alike.
    panel = drawn.panel
    values = drawn.embedding.astype(float)
    rng = np.random.default_rng(5)
    bare = replace(panel, features=panel.features[:, :0], feature_names=())
    for count, kept in ((2, False), (8, True), (30, True)):
        features = rng.standard_normal((panel.num_rows, count))
        names = tuple(f"f{k}" for k in range(count))
        found = channel_book(
            replace(panel, features=features, feature_names=names), values, "common"
        )
        plain = channel_book(bare, values, "common")
        assert np.array_equal(found.values, plain.values) == kept


def test_windows_are_training_rows_of_their_folds_and_purged(drawn):
    view = level_view(drawn.panel, OFFSETS[:1])
    split = drawn.panel.sessions[50]
    plans = [
        purged_plan(view.times, num_splits=5, embargo=2),
        chronological_plan(view.times, split_date=split, embargoes=(0, 3)).plan,
        walk_forward_plan(view.times, num_splits=3, embargo=1),
    ]
    for plan in plans:
        assert plan.windows
        for fold in plan.folds:
            assert not meets(view.times, fold.train, fold.test)
            assert fold.windows
            for w in fold.windows:
                train, validation = plan.windows[w]
                assert set(train) | set(validation) <= set(fold.train)
                assert not meets(view.times, train, validation)


def test_forward_chaining_validates_on_later_dates(drawn):
    view = level_view(drawn.panel, OFFSETS[:1])
    for plan in (
        chronological_plan(view.times, split_date=drawn.panel.sessions[50]).plan,
        group_plan(view.times, view.unit, num_splits=4),
    ):
        for train, validation in plan.windows:
            assert view.session[train].max() < view.session[validation].min()


def test_group_folds_keep_entities_apart_and_mix_dates(drawn):
    view = level_view(drawn.panel, OFFSETS[:1])
    plan = group_plan(view.times, view.unit, num_splits=4)
    for fold in plan.folds:
        assert not set(view.unit[fold.train]) & set(view.unit[fold.test])
        assert set(view.session[fold.train]) & set(view.session[fold.test])
        for w in fold.windows:
            assert set(plan.windows[w][0]) <= set(fold.train)


def test_seen_and_unseen_heads_train_on_as_many_rows(drawn):
    view = level_view(drawn.panel, OFFSETS[:1])
    both = seen_unseen_plan(view.times, view.unit, entity_folds=2, num_blocks=6)
    sizes = np.array([len(fold.train) for fold in both.plan.folds])
    assert np.ptp(sizes) / sizes.mean() < 0.15
    for fold, left_out in zip(both.plan.folds, both.left_out, strict=True):
        assert not set(view.unit[fold.train]) & set(view.unit[fold.test])
        assert left_out not in both.block[fold.train]
