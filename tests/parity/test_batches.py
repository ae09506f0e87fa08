"""What a global batch is: how its micro-batches are weighted, summed and left out."""

import pytest
import torch
from torch.nn import functional as F  # noqa: N812 - its name everywhere

from headrace.batch import IGNORE_INDEX
from headrace.errors import DataError
from tiny import (
    VOCAB,
    make_batch,
    make_batches,
    make_engine,
    reference_backward,
    reference_model,
    relative_error,
    returned_gradients,
    tiny_config,
    tiny_state,
)

CONFIG = {"max_position_embeddings": 128}


def random_ids(rows, length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (rows, length), generator=generator)


def first_gradients(batches, *, config=None, **settings):
    spec, state = tiny_state(config or tiny_config(**CONFIG))
    with make_engine(spec, state, **settings) as engine:
        result = engine.step(batches, learning_rate=0.0, max_grad_norm=1.0)
        return result, returned_gradients(engine)


@pytest.mark.parametrize("per_wave", [None, 1, 2])
def test_mean_of_means(per_wave):
    """Pitfall 1. 11 and 101 supervised tokens in one step: the gradient of all 112 in fp64."""
    long, short, middle = random_ids(1, 102), random_ids(1, 12, seed=1), random_ids(1, 40, seed=2)
    batches = [make_batch(long), make_batch(short), make_batch(middle)]
    assert [batch.num_supervised_tokens for batch in batches[:2]] == [101, 11]
    result, gradients = first_gradients(batches, micro_batches_per_wave=per_wave)

    spec, state = tiny_state(tiny_config(**CONFIG))
    model = reference_model(spec, state).double()
    sums = [
        F.cross_entropy(
            model(input_ids=batch.input_ids_BT, use_cache=False).logits[0],
            batch.targets_BT[0],
            reduction="sum",
            ignore_index=IGNORE_INDEX,
        )
        for batch in batches
    ]
    loss = sum(sums) / (101 + 11 + 39)
    loss.backward()
    assert result.loss == pytest.approx(loss.item(), rel=1e-6)
    for name, parameter in model.named_parameters():
        assert relative_error(gradients[name], parameter.grad) < 1e-5, name


def test_short_last_window_divided_by_the_full_count():
    """Pitfall 2. 5 micro-batches, 4 a step: the last step is the mean over its own one."""
    batches = make_batches(5, seed=3)
    spec, state = tiny_state(tiny_config())
    model = reference_model(spec, state)
    with make_engine(spec, state) as engine:
        engine.step(batches[:4], learning_rate=0.0, max_grad_norm=1.0)
        result = engine.step(batches[4:], learning_rate=0.0, max_grad_norm=1.0)
        gradients = returned_gradients(engine)
    assert result.loss == pytest.approx(reference_backward(model, batches[4:]), abs=2e-6)
    for name, parameter in model.named_parameters():
        assert relative_error(gradients[name], parameter.grad) < 1e-5, name


@pytest.mark.parametrize("per_wave", [None, 1])
def test_only_the_last_micro_batch_is_kept(per_wave):
    """Pitfall 3. The gradient of a step is the sum of what its micro-batches give alone."""
    batches = make_batches(4, seed=4)
    counts = [batch.num_supervised_tokens for batch in batches]
    _, together = first_gradients(batches, micro_batches_per_wave=per_wave)
    alone = [first_gradients([batch])[1] for batch in batches]
    for name, gradient in together.items():
        weighted = [g[name] * (n / sum(counts)) for g, n in zip(alone, counts, strict=True)]
        assert relative_error(gradient, sum(weighted)) < 1e-5, name
        assert relative_error(gradient, weighted[-1]) > 0.1, name


@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("per_wave", [None, 1])
def test_micro_batch_without_supervised_tokens(position, per_wave):
    """Pitfall 10. Mixed into a step it changes nothing, and nothing becomes NaN."""
    batches = make_batches(2, seed=5)
    config = tiny_config(tied=False)
    expected, wanted = first_gradients(batches, config=config)
    masked = make_batch(random_ids(2, 14, seed=6), unsupervised=(slice(None),))
    batches.insert(position, masked)
    result, gradients = first_gradients(batches, config=config, micro_batches_per_wave=per_wave)
    assert result.loss == expected.loss
    assert result.num_supervised_tokens == expected.num_supervised_tokens
    assert result.num_tokens == expected.num_tokens + 28
    assert [name for name in wanted if not torch.equal(gradients[name], wanted[name])] == []


def test_step_without_any_supervised_token_is_refused():
    masked = make_batch(random_ids(2, 14), unsupervised=(slice(None),))
    spec, state = tiny_state(tiny_config())
    with make_engine(spec, state) as engine, pytest.raises(DataError, match="supervised"):
        engine.step([masked], learning_rate=1e-3)


def test_right_padding_is_invisible():
    """Padding after a row's end changes neither loss nor gradients, beyond rounding."""
    ids = random_ids(2, 10, seed=7)
    expected, wanted = first_gradients([make_batch(ids)])
    padded = torch.cat([ids, torch.zeros(2, 5, dtype=torch.long)], dim=1)
    result, gradients = first_gradients([make_batch(padded, unsupervised=(slice(9, None),))])
    assert result.loss == pytest.approx(expected.loss, abs=1e-6)
    assert max(relative_error(gradients[name], wanted[name]) for name in wanted) < 1e-5


def test_micro_batches_of_different_shapes():
    """Rows and lengths may differ inside a step."""
    spec, state = tiny_state(tiny_config())
    model = reference_model(spec, state)
    batches = [
        make_batch(random_ids(1, 20, seed=1)),
        make_batch(random_ids(3, 6, seed=2)),
        make_batch(random_ids(2, 9, seed=3), cuts=(2, 3, 7)),
    ]
    with make_engine(spec, state) as engine:
        result = engine.step(batches, learning_rate=0.0, max_grad_norm=1.0)
        gradients = returned_gradients(engine)
    assert result.loss == pytest.approx(reference_backward(model, batches), abs=2e-6)
    for name, parameter in model.named_parameters():
        assert relative_error(gradients[name], parameter.grad) < 1e-5, name
