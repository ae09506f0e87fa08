"""Slices of experts on several ranks: whole layers on as many ranks, and slices on one."""

import pytest
import torch
from transformers import AutoConfig

import ranked
from families import family_config
from headrace.engine import EngineConfig
from headrace.engine.refusals import checked_sections
from headrace.errors import ConfigError
from headrace.models.lora import LoraSettings
from headrace.models.shrink import shrink
from headrace.models.slices import plan_sections
from headrace.models.spec import ModelSpec
from headrace.parallel.ranks import Ranks
from headrace.policy.budget import Workload, step_budget
from headrace.store.ranges import Share
from headrace.store.state import ModelState
from tiny import EXPERT_SIZES, relative_error

pytestmark = pytest.mark.multirank

LOSS, WEIGHTS = 1e-6, 2e-5  # float32 sums in another order
SIZES = EXPERT_SIZES | {"head_dim": 16, "initializer_range": 0.1, "mlp_only_layers": [1]}


def config_of(**values):
    return AutoConfig.for_model("qwen3_moe", **SIZES | values)


BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
DROPPING = LoraSettings(rank=4, dropout=0.2)
WITH_EXPERTS = LoraSettings(rank=2, layers=(2,), modules_to_save=("experts",))
RACES = {"poison_slots": True, "lane_jitter_seconds": 0.001, "chunk_bytes": 4096}
CASES = {
    "uneven, balanced": (2, {"config": config_of(**BALANCED), "num_batches": 5}, 3),
    # One rank's tokens all choose the same two experts: it has no row of most slices.
    "loads that differ": (2, {"config": config_of(), "constant": (1, 3, 5)}, 8),
    "no load at all": (3, {"config": config_of(), "num_batches": 2}, 3),
    "waves, races": (
        2,
        {
            "config": config_of(tie_word_embeddings=True),
            "micro_batches_per_wave": 2,
            "update_order": "weights_first",
            "weight_slots": 2,
            "gradient_slots": 1,
            "cuts": (4, 11),
            **RACES,
        },
        4,
    ),
    "on the device": (2, {"config": config_of(), "device_units": 2, **RACES}, 2),
    "frozen experts": (2, {"config": config_of(), "frozen": "experts"}, 3),
    "adapters with dropout": (2, {"config": config_of(**BALANCED), "lora": DROPPING, **RACES}, 3),
    "adapters and experts": (
        2,
        {
            "config": config_of(),
            "lora": WITH_EXPERTS,
            "num_batches": 5,
            "micro_batches_per_wave": 2,
        },
        8,
    ),
    "frozen below the last layer": (2, {"config": config_of(), "frozen_below": 2}, 8),
}


@pytest.mark.parametrize("name", CASES)
def test_slices_on_ranks_train_as_whole_layers_do(crews, name):
    """On two ranks every bit: a sum of two has one order, of ranks as of a token's experts."""
    size, settings, slices = CASES[name]
    settings = settings | {"max_grad_norm": None}
    whole = crews(size).run(ranked.trained, **settings)
    many = crews(size).run(ranked.trained, **settings, expert_slices=slices)
    assert all(other[:2] == many[0][:2] for other in many)  # the same bits on every rank
    for (loss, norm, *counts), (loss_1, norm_1, *counts_1) in zip(
        many[0][0], whole[0][0], strict=True
    ):
        assert norm == pytest.approx(norm_1, rel=LOSS)  # its blocks are others
        assert counts == counts_1
        assert loss == (loss_1 if size == 2 else pytest.approx(loss_1, rel=LOSS))
    found, expected = (ranked.joined([rank[2] for rank in ranks]) for ranks in (many, whole))
    for key, plane in expected.items():
        if size == 2:
            assert torch.equal(found[key], plane), key
        elif plane.norm() > 0:
            assert relative_error(found[key], plane) < WEIGHTS, key
    if size == 2:
        assert many[0][1] == whole[0][1]


@pytest.mark.parametrize("clipping", ["deferred", "optimistic"])
def test_slices_on_ranks_train_as_on_one(crews, clipping):
    """Clipped; the first norm of one gradient does not depend on who holds its blocks."""
    settings = {"config": config_of(**BALANCED), "expert_slices": 3, "chunk_bytes": 4096,
                "clipping": clipping, "steps": 12}  # fmt: skip
    said, evaluated, planes = ranked.trained(Ranks(), **settings)
    many = crews(2).run(ranked.trained, **settings)
    for (loss, norm, *_), (loss_1, norm_1, *_) in zip(many[0][0], said, strict=True):
        assert loss == pytest.approx(loss_1, rel=1e-5)
        assert norm == pytest.approx(norm_1, rel=1e-4)
    assert many[0][1] == pytest.approx(evaluated, rel=1e-5)
    found, expected = ranked.joined([rank[2] for rank in many]), ranked.joined([planes])
    for key, plane in expected.items():
        if plane.norm() > 0:
            assert relative_error(found[key], plane) < 1e-3, key
    once = settings | {"num_batches": 1, "steps": 1}
    alone = ranked.trained(Ranks(), **once)[0][0]
    for size in (2, 3):
        assert crews(size).run(ranked.trained, **once)[0][0][0][:2] == alone[:2]


def test_all_ranks_skip_a_step_of_slices_that_is_infinite_on_one(crews):
    settings = {"config": config_of(), "expert_slices": 3, "steps": 13, "infinite_at": 11,
                "clipping": "optimistic", "max_grad_norm": 1.0, "chunk_bytes": 4096}  # fmt: skip
    many = crews(2).run(ranked.trained, **settings)
    for rank in many:
        assert [skipped for *_, skipped in rank[0]] == [False] * 11 + [True, False]
    assert many[0][:2] == many[1][:2]


def test_split_masters_and_float32_routers_of_slices_on_ranks(crews):
    """The bfloat16 state: low halves of routers reach the section without experts."""
    config = shrink(family_config("GLM-4.5"), 2)
    config.num_experts_per_tok = 2
    spec = ModelSpec(config)
    assert any(param.trainable for param in spec.units[2].float32_params)
    assert spec.experts
    settings = {"config": config, "dtype": "bfloat16", "vocab": config.vocab_size, "steps": 2,
                "learning_rate": 1e-2, "max_grad_norm": None}  # fmt: skip
    whole = crews(2).run(ranked.trained, **settings)
    many = crews(2).run(ranked.trained, **settings, expert_slices=3)
    assert many[0][1] == whole[0][1]
    found, expected = (ranked.joined([rank[2] for rank in ranks]) for ranks in (many, whole))
    for key, plane in expected.items():
        assert torch.equal(found[key], plane), key


def test_ranks_take_the_choice_of_the_main_one(crews):
    """Machines may differ in their rates, and ranks that cut layers otherwise would never meet."""
    first, *others = crews(3).run(ranked.placed_alike)
    assert (first["expert_slices"], first["device_units"]) == (2, 0)
    assert all(other == first for other in others)


@pytest.mark.parametrize("waves", [1, 2])
@pytest.mark.parametrize("slices", [1, 3, 8])
@pytest.mark.parametrize("lora", [None, DROPPING, WITH_EXPERTS])
def test_bytes_are_those_every_rank_allocates(crews, slices, waves, lora):
    """Windows, accumulators, state and returned gradients, to the byte, of the main rank."""
    per_wave = 2 // waves
    config = EngineConfig(
        expert_slices=slices, micro_batches_per_wave=per_wave, update_threads=1, device_units=0
    )
    work = Workload(tokens=28, micro_batches=2, sequence_length=14)
    spec = ModelSpec(config_of(), lora=lora)
    budget = step_budget(spec, config, "float32", work, num_ranks=2)
    (found, other) = crews(2).run(
        ranked.allocated,
        config=config_of(),
        lora=lora,
        expert_slices=slices,
        micro_batches_per_wave=per_wave,
    )
    assert budget.device["weight slots"] == found["slots"] == other["slots"]
    assert budget.device["gradient accumulators"] == found["accumulators"]
    assert budget.host["returned gradients"] == found["returned"]
    assert budget.host["state"] == found["state"]


@pytest.mark.parametrize(("given", "allocated"), [(3, 1), (1, 3), (3, 2)])
def test_a_state_that_was_shared_out_otherwise_is_refused(given, allocated):
    spec = ModelSpec(config_of())
    sections = plan_sections(spec, allocated)
    state = ModelState(spec.units, "float32", share=Share(num_ranks=2), sections=sections)
    assert checked_sections(EngineConfig(expert_slices=allocated), spec, state) == sections
    with pytest.raises(ConfigError, match=f"expert_slices is {given}, but the state of layers.0"):
        checked_sections(EngineConfig(expert_slices=given), spec, state)
