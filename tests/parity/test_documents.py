"""Who sees whom: packed documents, sliding windows, causality; and hidden states as HF's."""

import pytest
import torch

from headrace.errors import ConfigError
from tiny import (
    VOCAB,
    make_batch,
    make_batches,
    make_engine,
    reference_logits,
    reference_model,
    relative_error,
    returned_gradients,
    tiny_config,
    tiny_state,
)

FAMILIES = ["qwen3", "llama", "mistral", "qwen2"]


def random_ids(rows, length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (rows, length), generator=generator)


def loss_and_gradients(config, batches):
    spec, state = tiny_state(config)
    with make_engine(spec, state) as engine:
        result = engine.step(batches, learning_rate=0.0, max_grad_norm=1.0)
        return result.loss, returned_gradients(engine)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_see_each_other(family):
    """Pitfall 22. Perturb document A: B's loss and gradients keep every bit."""
    config = tiny_config(family)
    ids = random_ids(2, 16)
    other = ids.clone()
    other[:, :7] = (other[:, :7] + 1) % VOCAB
    only_b = (slice(0, 7),)
    loss, gradients = loss_and_gradients(config, [make_batch(ids, cuts=(7,), unsupervised=only_b)])
    batch = make_batch(other, cuts=(7,), unsupervised=only_b)
    assert batch.num_supervised_tokens == 16
    perturbed, others = loss_and_gradients(config, [batch])
    assert perturbed == loss
    assert [name for name in gradients if not torch.equal(gradients[name], others[name])] == []
    # The check can fail: as one document a row, B sees A.
    unpacked = [make_batch(tokens, unsupervised=only_b) for tokens in (ids, other)]
    alone, seen = (loss_and_gradients(config, [batch])[0] for batch in unpacked)
    assert alone != seen


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_unpacked(family):
    """Pitfall 22. Three documents in one row or each in a row of its own, to rounding."""
    config = tiny_config(family)
    ids = random_ids(1, 18)
    loss, gradients = loss_and_gradients(config, [make_batch(ids, cuts=(5, 11))])
    rows = [make_batch(ids[:, a:b]) for a, b in ((0, 5), (5, 11), (11, 18))]
    unpacked, others = loss_and_gradients(config, rows)
    assert loss == pytest.approx(unpacked, abs=2e-6)
    assert max(relative_error(gradients[name], others[name]) for name in gradients) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_evaluation_is_the_loss_of_training(family):
    spec, state = tiny_state(tiny_config(family))
    batches = make_batches(3, cuts=(4, 11))
    with make_engine(spec, state, micro_batches_per_wave=2) as engine:
        result = engine.step(batches, learning_rate=0.0, max_grad_norm=1.0)
        evaluation = engine.evaluate(batches)
    assert evaluation.num_supervised_tokens == result.num_supervised_tokens
    mean = evaluation.loss_sum / evaluation.num_supervised_tokens
    assert mean == pytest.approx(result.loss, rel=1e-6)


WINDOWED = {
    "mistral": {"sliding_window": 4},
    "qwen2": {"sliding_window": 4, "max_window_layers": 0},
    "qwen3": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0},
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("family", WINDOWED)
def test_sliding_window_is_lost(family, packed):
    """Pitfall 23. One layer: a token 4 positions back changes nothing, one 3 back does."""
    config = tiny_config(family, num_hidden_layers=1, **WINDOWED[family])
    cuts, last = ((3,), 14) if packed else ((), 14)
    ids = random_ids(1, 16)
    losses = {}
    for distance in (None, 4, 3):
        tokens = ids.clone()
        if distance is not None:
            tokens[0, last - distance] = (tokens[0, last - distance] + 1) % VOCAB
        batch = make_batch(tokens, cuts=cuts, unsupervised=(slice(0, last),))
        assert batch.num_supervised_tokens == 1
        losses[distance] = loss_and_gradients(config, [batch])[0]
    assert losses[4] == losses[None]
    assert losses[3] != losses[None]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_hidden_states_as_hugging_face_counts_them(family, tied):
    spec, state = tiny_state(tiny_config(family, tied=tied))
    model = reference_model(spec, state)
    ids = random_ids(3, 13)
    with torch.no_grad():
        reference = model(input_ids=ids, output_hidden_states=True).hidden_states
    with make_engine(spec, state) as engine:
        found = [engine.hidden_states(ids, layer=layer) for layer in range(len(reference))]
        last = engine.hidden_states(ids)
        with pytest.raises(ConfigError, match="layer 4"):
            engine.hidden_states(ids, layer=4)
        with pytest.raises(ConfigError, match="layer -5"):
            engine.hidden_states(ids, layer=-5)
    assert torch.equal(last, found[-1])
    for hidden_BTD, wanted_BTD in zip(found, reference, strict=True):
        assert (hidden_BTD - wanted_BTD).abs().max() < 1e-5
        assert hidden_BTD.dtype == torch.float32


def test_hidden_states_of_right_padded_rows():
    """Padding on the right does not reach the tokens before it."""
    spec, state = tiny_state(tiny_config("mistral"))
    ids = random_ids(1, 9)
    padded = torch.cat([ids, torch.full((1, 4), 7)], dim=1)
    with make_engine(spec, state) as engine:
        difference = engine.hidden_states(padded)[:, :9] - engine.hidden_states(ids)
    assert difference.abs().max() < 1e-5


def test_hidden_states_at_given_positions():
    """Positions say where tokens are, not where documents end: HF would infer a cut at the gap."""
    spec, state = tiny_state(tiny_config("qwen3"))
    model = reference_model(spec, state)
    ids, positions = random_ids(1, 6), torch.tensor([[3, 4, 5, 9, 10, 11]])
    with make_engine(spec, state) as engine:
        hidden = engine.hidden_states(ids, positions)
    causal = torch.full((6, 6), float("-inf")).triu(1)[None, None]
    with torch.no_grad():
        output = model.model(input_ids=ids, position_ids=positions, attention_mask=causal)
    wanted = output.last_hidden_state
    assert (hidden - wanted).abs().max() < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_packed_rows(family):
    """Hidden states times the head are transformers' logits under an explicit document mask."""
    spec, state = tiny_state(tiny_config(family))
    model = reference_model(spec, state)
    (batch,) = make_batches(1, cuts=(4, 11))
    with torch.no_grad():
        logits = reference_logits(model, batch)
    log_probabilities = torch.log_softmax(logits.double(), dim=-1)
    targets = batch.targets_BT.clamp_min(0)
    picked = log_probabilities.gather(2, targets[..., None])[..., 0]
    wanted = -picked[batch.targets_BT >= 0].sum()
    with make_engine(spec, state) as engine:
        evaluation = engine.evaluate([batch])
    assert evaluation.loss_sum == pytest.approx(float(wanted), rel=1e-6)
