"""Steps of several ranks against the same steps of one: sums in another order, nothing else.

Every case trains three steps with clipping active, over micro-batches of unequal supervision.
"""

import pytest
import torch

import ranked
from families import family_config
from headrace.models.shrink import shrink
from headrace.models.spec import ModelSpec
from headrace.parallel.ranks import Ranks
from tiny import relative_error, tiny_config

pytestmark = pytest.mark.multirank

# float32 sums of a few thousand terms in another order; weights near 0.1 move by 1e-3 a step.
LOSS, WEIGHTS = 1e-6, 2e-5
CASES = {
    "tied, uneven": (2, {"config": tiny_config(tied=True), "num_batches": 7}),
    "waves, recompute, races": (
        2,
        {
            "config": tiny_config("llama-bias"),
            "micro_batches_per_wave": 2,
            "activations": "recompute",
            "poison_slots": True,
            "lane_jitter_seconds": 0.002,
            "update_order": "weights_first",
            "chunk_bytes": 4096,
        },
    ),
    "on the device, offload": (
        2,
        {"config": tiny_config(), "device_units": 3, "activations": "offload"},
    ),
    "frozen below the last layer": (
        2,
        {"config": tiny_config(), "frozen_below": 2, "activations": "recompute"},
    ),
    "a rank without micro-batches": (3, {"config": tiny_config(), "num_batches": 2}),
    "packed": (3, {"config": tiny_config("mistral"), "cuts": (5, 9), "num_batches": 4}),
}


@pytest.mark.parametrize("name", CASES)
def test_ranks_train_as_one(crews, name):
    """Losses, norms, counts, evaluations and every plane of the state."""
    size, settings = CASES[name]
    said, evaluated, planes = ranked.trained(Ranks(), **settings)
    many = crews(size).run(ranked.trained, **settings)
    assert all(other[:2] == many[0][:2] for other in many)  # the same bits on every rank
    for (loss, norm, *counts), (loss_1, norm_1, *counts_1) in zip(many[0][0], said, strict=True):
        assert loss == pytest.approx(loss_1, rel=LOSS)
        assert norm == pytest.approx(norm_1, rel=LOSS)
        assert counts[1:] == counts_1[1:]
    assert many[0][1] == pytest.approx(evaluated, rel=LOSS)
    found, expected = ranked.joined([rank[2] for rank in many]), ranked.joined([planes])
    assert sum(len(rank[2]["layers.2", "exp_avg"]) > 0 for rank in many) == size
    for key, plane in expected.items():
        assert found[key].shape == plane.shape
        if plane.norm() > 0:
            assert relative_error(found[key], plane) < WEIGHTS, key


def test_the_first_norm_of_one_gradient_does_not_depend_on_ranks(crews):
    """With one micro-batch the gradient is the same bit by bit, and so is its norm."""
    settings = {"config": tiny_config(), "num_batches": 1, "steps": 1}
    alone = ranked.trained(Ranks(), **settings)[0][0]
    for size in (2, 3):
        assert crews(size).run(ranked.trained, **settings)[0][0][0][:2] == alone[:2]


@pytest.mark.parametrize("clipping", ["deferred", "optimistic"])
def test_all_ranks_skip_a_step_that_is_infinite_on_one(crews, clipping):
    """Every rank takes back what it has updated early, and goes on as if the step had not been."""
    settings = {"config": tiny_config(), "steps": 13, "infinite_at": 11, "clipping": clipping,
                "max_grad_norm": 1.0, "chunk_bytes": 4096}  # fmt: skip
    said, evaluated, planes = ranked.trained(Ranks(), **settings)
    assert [skipped for *_, skipped in said] == [False] * 11 + [True, False]
    many = crews(2).run(ranked.trained, **settings)
    assert [skipped for *_, skipped in many[1][0]] == [skipped for *_, skipped in said]
    assert many[0][1] == pytest.approx(evaluated, rel=1e-5)
    found, expected = ranked.joined([rank[2] for rank in many]), ranked.joined([planes])
    for key, plane in expected.items():
        if plane.norm() > 0:
            # An inverted update restores the second moment to some 1e-4.
            assert relative_error(found[key], plane) < (1e-3 if clipping == "optimistic" else 1e-4)


def test_split_masters_train_as_one(crews):
    """The bfloat16 state: both planes of a master lie in the same shard."""
    settings = {"config": tiny_config(), "dtype": "bfloat16"}
    planes = ranked.joined([ranked.trained(Ranks(), **settings)[2]])
    found = ranked.joined([rank[2] for rank in crews(2).run(ranked.trained, **settings)])
    for unit in {unit for unit, _ in planes}:
        kinds = [(found[unit, kind], planes[unit, kind]) for kind in ("weights", "remainder")]
        # A step of the remainder is a 65536th of one of the weight.
        values = [high.double() + low.double() * 2.0**-24 for high, low in zip(*kinds, strict=True)]
        assert torch.allclose(*values, atol=1e-3)


def test_routers_in_float32_keep_their_low_halves(crews):
    """A bfloat16 model's float32 router: halves that are updated on one rank reach the others."""
    config = shrink(family_config("GLM-4.5"), 2)
    spec = ModelSpec(config)
    assert any(param.trainable for param in spec.units[2].float32_params)
    settings = {"config": config, "dtype": "bfloat16", "vocab": config.vocab_size, "steps": 2,
                "learning_rate": 1e-2, "gradient_dtype": "float32"}  # fmt: skip
    _, evaluated, _ = ranked.trained(Ranks(), **settings)
    many = crews(2).run(ranked.trained, **settings)
    # 3e-9 apart; 2e-6 with low halves of before the steps.
    assert many[0][1] == pytest.approx(evaluated, rel=1e-7)


def test_the_benchmark_runs(crews):
    """On shapes that say nothing of speed."""
    parity = ["parity", "--model", "smoke", "--device", "cpu"]
    assert crews(2).run(ranked.benchmarked, words=parity)[0]["agrees"]
    speed = ["speed", "--model", "smoke", "--tokens", "2048", "--sequence", "256", "--steps", "1"]
    found = crews(2).run(ranked.benchmarked, words=[*speed, "--device", "cpu"])[0]
    assert found["tokens_per_second"] > 0
    assert len(found["host_rss_gib"]) == found["num_ranks"] == 2
