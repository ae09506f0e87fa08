"""LoRA against full weight at the smallest size: really trained, embedded and audited."""

from __future__ import annotations

import json

import pytest
from benchmarks.lora_against_full import Sizes, compare

TINY = Sizes(
    num_entities=6,
    num_sessions=320,
    rows_per_entity=160,
    hidden_size=32,
    num_layers=1,
    documents_a_step=16,
    base_steps=3,
    steps=4,
    ranks=(2,),
    num_shifts=39,
)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return compare(TINY, tmp_path_factory.mktemp("runs"))


def test_every_way_of_training_is_audited_and_compared(found):
    assert set(found["verdicts"]) == {"base", "full", "lora2", "lora2-embed"}
    # Three steps from random weights: nothing that an audit may call knowledge.
    assert "knows_the_future" not in found["verdicts"].values()
    pairs = {(pair["base"], pair["trained"]) for pair in found["audit"]["reductions"]}
    assert {("base", "full"), ("base", "lora2"), ("lora2", "full")} < pairs
    assert len(pairs) == 5
    for pair in found["audit"]["reductions"]:
        assert pair["walk_forward"]["low"] < pair["walk_forward"]["high"]
        assert [row["embargo_sessions"] for row in pair["embargo"]] == [0, 5, 20]
    assert len(found["audit"]["twins"]) == 4


def test_adapters_train_few_numbers_and_start_where_full_weight_starts(found):
    runs = found["runs"]
    assert runs["lora2"]["num_trained"] < runs["full"]["num_trained"] / 5
    assert runs["full"]["num_trained"] == runs["base"]["num_trained"]


def test_the_tables_show_each_model_and_each_pair(found):
    table = "\n".join(found["table"])
    for name in ("| base |", "| full |", "| lora2 |", "| base, full |", "| lora2, full |"):
        assert name in table
    json.dumps(found)
