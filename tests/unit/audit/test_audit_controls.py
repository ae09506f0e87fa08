"""Controls: recall, loss by month, the positive control, each with a known answer and a null."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from headrace.audit import AuditConfig, run_audit
from headrace.audit.perplexity import document_losses, losses_by_month, read_losses
from headrace.audit.recall import RecallAnswers, judge_recall, read_answers, stated_moves
from headrace.audit.synthetic import market_shocks
from headrace.errors import ConfigError, DataError

CONFIG = AuditConfig()


def answers(days, rng, *, share=0.0, before_only=True, count=160):
    """Stated moves that explain ``share`` of the true ones, up to the middle or always."""
    true = market_shocks(count, rng)
    stated = rng.standard_normal(count)
    known = np.arange(count) < count // 2 if before_only else np.ones(count, dtype=bool)
    stated[known] = np.sqrt(share) * true[known] + np.sqrt(1 - share) * stated[known]
    return RecallAnswers(date=days(count).astype("datetime64[us]"), stated=stated, true=true)


CUTOFF = str(np.datetime64("2020-01-01") + np.timedelta64(79, "D"))


def test_dated_moves_known_before_the_cutoff_only_are_seen(days):
    rng = np.random.default_rng(0)
    record, significant = judge_recall(answers(days, rng, share=0.5), CUTOFF, CONFIG, stack="s")
    assert significant == (True, False)
    assert record.before.n == record.after.n == 80
    assert record.before.null.num_draws == 61, "all admissible shifts of one side"


def test_recall_claims_five_in_a_hundred_when_nothing_is_known(days):
    rng = np.random.default_rng(1)
    claims = [
        judge_recall(answers(days, rng, count=200), CUTOFF, CONFIG, stack="s")[1][0]
        for _ in range(400)
    ]
    assert 0.02 <= np.mean(claims) <= 0.085


def test_power_of_recall(days):
    """audit.md: 0.03 of R2 is seen on 91% with 60 dates: of a share of 0.2 here, most are."""
    rng = np.random.default_rng(2)
    seen = [
        judge_recall(answers(days, rng, share=0.2), CUTOFF, CONFIG, stack="s")[1][0]
        for _ in range(60)
    ]
    assert np.mean(seen) > 0.9


def test_a_side_without_sixty_dates_decides_nothing(days):
    rng = np.random.default_rng(3)
    record, significant = judge_recall(
        answers(days, rng, share=0.5), "2020-01-20", CONFIG, stack="s"
    )
    assert significant is None
    assert record.before is None
    assert record.after is not None
    assert judge_recall(answers(days, rng), None, CONFIG, stack="s")[1] is None


def test_answers_that_cannot_be_scored_are_refused(days, tmp_path):
    date = days(4).astype("datetime64[us]")
    one = np.ones(4)
    for bad in (
        {"stated": np.array([1, np.nan, 1, 1])},
        {"date": date[::-1]},
        {"true": one[:3]},
    ):
        with pytest.raises(DataError, match="recall answers"):
            RecallAnswers(**({"date": date, "stated": one, "true": one} | bad))
    with pytest.raises(DataError, match="no recall answers"):
        read_answers(tmp_path / "missing.csv")
    (tmp_path / "a.csv").write_text("date,stated\n2020-01-01,1\n")
    with pytest.raises(DataError, match="lacks true"):
        read_answers(tmp_path / "a.csv")
    (tmp_path / "c.csv").write_text("date,stated,true\n2020-01-02,1,2\n2020-01-03,up,4\n")
    with pytest.raises(DataError, match=r"'stated'.*row 1"):
        read_answers(tmp_path / "c.csv")
    # The third of April and the fourth of March are written alike.
    (tmp_path / "d.csv").write_text("date,stated,true\n2020-01-02,1,2\n03/04/2020,3,4\n")
    with pytest.raises(DataError, match=r"'date'.*row 1"):
        read_answers(tmp_path / "d.csv")
    (tmp_path / "b.csv").write_text("date,stated,true\n2020-01-02,1,2\n2020-01-01,3,4\n")
    np.testing.assert_array_equal(read_answers(tmp_path / "b.csv").stated, [3, 1])


class Letters:
    """A tokenizer of single characters."""

    def __call__(self, text, *, add_special_tokens=True):
        del add_special_tokens
        return {"input_ids": [ord(c) % 128 for c in text]}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=256,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def test_stated_moves_are_log_odds_of_the_two_endings_whatever_the_batch(model):
    dates = ["2020-01-01", "2020-01-02", "2020-10-13"]
    got = stated_moves(model, Letters(), dates, market="it", batch_size=2)
    for date, value in zip(dates, got, strict=True):
        total = 0.0
        for sign, ending in ((1, " higher"), (-1, " lower")):
            prompt = Letters()(f"On {date}, it closed")["input_ids"]
            ids = torch.tensor([prompt + Letters()(ending)["input_ids"]])
            with torch.no_grad():
                scores = torch.log_softmax(model(ids).logits[0], dim=-1)
            for k in range(len(prompt), ids.shape[1]):
                total += sign * float(scores[k - 1, ids[0, k]])
        assert value == pytest.approx(total, abs=1e-4)


def test_document_losses_predict_every_token_but_the_first_once(model):
    ids = [ord(c) % 128 for c in "some longer document"]
    ((date, total, count),) = document_losses(model, [("2020-01-05", ids)], max_length=1000)
    assert (date, count) == ("2020-01-05", len(ids) - 1)
    with torch.no_grad():
        logits = model(torch.tensor([ids[:-1]])).logits[0]
    whole = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="sum")
    assert total == pytest.approx(float(whole), rel=1e-5)
    ((_, _, pieces),) = document_losses(model, [("2020-01-05", ids)], max_length=6)
    assert pieces == count
    assert list(document_losses(model, [("2020-01-05", [3])], max_length=6)) == []


def test_losses_are_weighed_by_tokens_and_covered_by_their_interval():
    rng = np.random.default_rng(4)
    covered = 0
    for _ in range(200):
        tokens = rng.integers(20, 400, 60)
        loss = tokens * (3.0 + 0.5 * rng.standard_normal(60))
        dates = np.full(60, np.datetime64("2020-05-03"))
        ((record),) = losses_by_month(dates, loss, tokens, stack="s")
        covered += record.loss.low < 3.0 < record.loss.high
    assert record.month == "2020-05"
    assert record.loss.value == pytest.approx(loss.sum() / tokens.sum())
    assert 0.9 <= covered / 200 <= 0.985


def test_losses_that_are_none_are_refused(tmp_path):
    with pytest.raises(DataError, match="document 1"):
        losses_by_month(
            np.array(["2020-01-01"] * 2, dtype="datetime64[D]"), np.array([1.0, np.inf]),
            np.array([3, 3]), stack="s",
        )  # fmt: skip
    with pytest.raises(DataError, match="no document losses"):
        read_losses(tmp_path / "missing.csv", stack="s")
    (tmp_path / "b.csv").write_text("date,loss_sum,num_tokens\n2020-01-03,4.0,\n")
    with pytest.raises(DataError, match="document 0"):
        read_losses(tmp_path / "b.csv", stack="s")
    (tmp_path / "c.csv").write_text("date,loss_sum,num_tokens\n2020-01-03,4.0,2\n,9,3\n")
    with pytest.raises(DataError, match="'date' is empty in row 1"):
        read_losses(tmp_path / "c.csv", stack="s")
    (tmp_path / "a.csv").write_text("date,loss_sum,num_tokens\n2020-01-03,4.0,2\n2020-02-01,9,3\n")
    months = read_losses(tmp_path / "a.csv", stack="s")
    assert [(m.month, m.loss.value) for m in months] == [("2020-01", 2.0), ("2020-02", 3.0)]
    assert months[0].loss.low is None


def test_the_positive_control_finds_a_large_leak_and_says_where_it_misses_a_small_one(small, quick):
    drawn = small(seed=4)
    found = []
    for share in (0.1, 0.0005):
        result = run_audit(
            drawn.panel, {"m": drawn.embedding}, {"m": drawn.cutoff},
            config=replace(quick, positive_control=share),
        )  # fmt: skip
        (control,) = result.controls
        assert control.planted_share == share
        assert set(control.contrasts) == {"common", "entity"}
        found.append(control.detected)
    assert found == [True, False]


def test_recall_decides_where_no_date_lies_after_the_cutoff_of_the_panel(days, small, quick):
    drawn = small(seed=4)
    rng = np.random.default_rng(5)
    probe = answers(days, rng, share=0.5)
    cutoff = "2020-03-20"
    plain = run_audit(drawn.panel, {"m": drawn.embedding}, {"m": cutoff}, config=quick)
    assert plain.models[0].verdict == "not_identified"
    probed = run_audit(
        drawn.panel, {"m": drawn.embedding}, {"m": cutoff}, recall={"m": probe}, config=quick
    )
    assert probed.models[0].verdict == "knows_the_future"
    assert probed.models[0].recall.before.p_value <= 0.05
    with pytest.raises(ConfigError, match="'x', which has no embeddings"):
        run_audit(drawn.panel, {"m": drawn.embedding}, recall={"x": probe}, config=quick)
