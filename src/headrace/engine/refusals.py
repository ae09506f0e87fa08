"""Settings that do not fit the model or its state: refused before an engine allocates anything."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.errors import ConfigError
from headrace.models.slices import check_slices, plan_sections

if TYPE_CHECKING:
    from headrace.engine.config import EngineConfig
    from headrace.models.spec import ModelSpec
    from headrace.store.sections import Section
    from headrace.store.state import ModelState


def checked_sections(
    config: EngineConfig, spec: ModelSpec, state: ModelState
) -> tuple[tuple[Section, ...], ...]:
    """What each unit is sent in, if the settings can run.

    Raises:
        ConfigError: they say something else than the state, or what would change the result.
    """
    if config.device_units not in (None, state.device_units):
        raise ConfigError(
            f"engine.device_units is {config.device_units}, but the state was allocated "
            f"with {state.device_units} units on the device",
            remedy=f"engine.device_units: {state.device_units}, or allocate the state with "
            f"device_units={config.device_units}",
        )
    if config.rows_per_micro_batch is not None and spec.is_balanced:
        raise ConfigError(
            f"engine.rows_per_micro_batch is {config.rows_per_micro_batch}, but a loss "
            "over the tokens of each micro-batch balances this model's experts, and cutting "
            "changes it",
            remedy="leave it out and lower per_device_train_batch_size instead",
        )
    slices = config.expert_slices or 1
    check_slices(spec, slices)
    sections = plan_sections(spec, slices, state.device_units)
    for shard, parts in zip(state.shards, sections, strict=True):
        if not shard.is_whole and len(shard.sections) != len(parts):
            raise ConfigError(
                f"engine.expert_slices is {slices}, but the state of {shard.layout.name} was "
                f"shared out among ranks in {len(shard.sections)} pieces, not {len(parts)}",
                remedy="give ModelState the sections that plan_sections makes of the same number",
            )
    return sections
