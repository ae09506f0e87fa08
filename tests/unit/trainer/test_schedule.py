"""Learning rates, compared with transformers' own schedulers to the last bit."""

import pytest
import torch
from transformers.optimization import get_scheduler

from headrace.data.batching import LoaderSettings
from headrace.errors import ConfigError
from headrace.trainer.schedule import KINDS, Schedule, ScheduleSettings, resolve_warmup

DECAY = {"num_decay_steps": 9, "min_lr_ratio": 0.1}
OPTIONS = {
    "cosine_with_min_lr": [{"min_lr": 3e-6}, {"min_lr_rate": 0.1, "num_cycles": 1.5}],
    "cosine_warmup_with_min_lr": [
        {"min_lr": 3e-6}, {"min_lr_rate": 0.1}, {"min_lr": 1e-6, "warmup_lr_rate": 0.2},
    ],
    "cosine": [{}, {"num_cycles": 2}],
    "cosine_with_restarts": [{}, {"num_cycles": 3}],
    "polynomial": [{}, {"lr_end": 1e-6, "power": 2.0}],
    "inverse_sqrt": [{}, {"timescale": 50}],
    "warmup_stable_decay": [
        {"num_decay_steps": 20},
        {"num_decay_steps": 20, "num_stable_steps": 10},
        DECAY | {"decay_type": "linear", "warmup_type": "cosine"},
        DECAY | {"decay_type": "1-sqrt", "warmup_type": "1-sqrt"},
    ],
}  # fmt: skip
CASES = [(kind, options) for kind in KINDS for options in OPTIONS.get(kind, [{}])]


def transformers_table(kind, options, *, peak, num_steps, warmup):
    """What ``LambdaLR`` holds before each optimizer step."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    scheduler = get_scheduler(
        kind, optimizer, warmup, num_steps, scheduler_specific_kwargs=dict(options)
    )
    table = []
    for _ in range(num_steps):
        table.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return table


@pytest.mark.filterwarnings("ignore:Both num_training_steps and num_stable_steps")
@pytest.mark.parametrize(("kind", "options"), CASES)
@pytest.mark.parametrize("warmup", [0, 7])
def test_learning_rates_are_transformers_to_the_last_bit(kind, options, warmup):
    settings = ScheduleSettings(
        kind=kind, learning_rate=3e-4, num_steps=61, num_warmup_steps=warmup, options=options
    )
    expected = transformers_table(kind, options, peak=3e-4, num_steps=61, warmup=warmup)
    assert Schedule(settings).table() == expected
    assert (
        len(set(expected)) > 1
        or kind == "constant"
        or (kind, warmup) == ("constant_with_warmup", 0)
    )


def test_the_schedule_does_not_step_once_a_process():
    """Pitfall 25. One global batch over 1, 2 and 4 ranks: the same table, a row a step."""
    tables = []
    for ranks in (1, 2, 4):
        batch = LoaderSettings(micro_batch_size=2, accumulation=4 // ranks, num_ranks=ranks)
        num_steps = 2 * batch.steps_per_epoch(83)
        settings = ScheduleSettings(
            kind="cosine",
            learning_rate=1e-3,
            num_steps=num_steps,
            num_warmup_steps=resolve_warmup(0, 0.1, num_steps),
        )
        tables.append(Schedule(settings).table())
    assert len(tables[0]) == 2 * 11
    assert tables[0] == tables[1] == tables[2]


@pytest.mark.parametrize(
    ("steps", "ratio", "expected"),
    [
        (0, None, 0),
        (100, None, 100),
        (0, 0.03, 31),
        (0.03, None, 31),
        (0, 1.0, 1010),
        (12.7, 0, 12),
    ],
)
def test_warmup_is_a_count_or_a_share_rounded_up(steps, ratio, expected):
    assert resolve_warmup(steps, ratio, 1010) == expected


def test_contradicting_or_impossible_warmups_are_refused():
    for steps, ratio in ((10, 0.1), (-1, None), (0, 1.5), (0, -0.1)):
        with pytest.raises(ConfigError):
            resolve_warmup(steps, ratio, 100)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("cosin", {}, "not a schedule"),
        ("reduce_lr_on_plateau", {}, "could not be repeated"),
        ("cosine", {"min_lr": 1e-5}, "no option 'min_lr'"),
        ("cosine_with_min_lr", {}, "needs a floor"),
        ("cosine_with_min_lr", {"min_lr": 1e-5, "min_lr_rate": 0.1}, "needs a floor"),
        ("warmup_stable_decay", {}, "length of its decay"),
        ("warmup_stable_decay", {"num_decay_steps": 5, "decay_type": "cubic"}, "decay_type"),
        ("warmup_stable_decay", {"num_decay_steps": 2.5}, "whole number of steps"),
        ("warmup_stable_decay", {"num_decay_steps": "x"}, "num_decay_steps is 'x'"),
        ("polynomial", {"lr_end": 1.0}, "not below"),
        ("polynomial", {"power": -1}, "power is -1"),
        ("cosine_with_min_lr", {"min_lr": float("nan")}, "min_lr is nan"),
        ("cosine_with_min_lr", {"min_lr": "low"}, "min_lr is 'low'"),
        ("cosine_with_min_lr", {"min_lr_rate": [0.1]}, "min_lr_rate is"),
        ("cosine_with_restarts", {"num_cycles": float("inf")}, "num_cycles is inf"),
        ("cosine", {"num_cycles": True}, "num_cycles is True"),
    ],
)
def test_wrong_schedules_are_refused(kind, options, message):
    with pytest.raises(ConfigError, match=message):
        Schedule(ScheduleSettings(kind=kind, learning_rate=1e-3, num_steps=10, options=options))


def test_an_option_that_yaml_reads_as_text_is_a_number():
    """YAML takes 1e-6 for a word, because it has no point."""

    def rates(options):
        settings = ScheduleSettings(
            kind="cosine_with_min_lr", learning_rate=1e-3, num_steps=10, options=options
        )
        return Schedule(settings).table()

    assert rates({"min_lr": "1e-6", "num_cycles": None}) == rates({"min_lr": 1e-6})
