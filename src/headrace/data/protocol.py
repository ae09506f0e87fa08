"""What the trainer asks of a loader, whether its datasets are stores or streams."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from headrace.data.batching import LoaderSettings
    from headrace.data.loader import StepBatch
    from headrace.data.sampler import LoaderState


class Loader(Protocol):
    """Steps without end, from a state that says where to go on.

    Attributes:
        settings: batch sizes.
        state: where the next step begins.
        seed: of the order.
        steps_per_epoch: 0 where there are no epochs.
    """

    settings: LoaderSettings
    state: LoaderState

    @property
    def seed(self) -> int:
        """Of the order."""
        ...

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of an epoch; 0 where there are no epochs."""
        ...

    @property
    def epoch(self) -> float:
        """Epochs done, with the share of the one that is going on."""
        ...

    def next_step(self) -> StepBatch:
        """The next step's micro-batches; advances the state."""
        ...

    def state_after(self, num_steps: int) -> LoaderState:
        """Where the loader stands after that many steps from the beginning."""
        ...

    def describe(self) -> list[str]:
        """Lines for people about the mixture."""
        ...

    def facts(self) -> list[dict[str, Any]]:
        """One object a dataset for the run's record, as JSON types."""
        ...

    def fingerprint(self) -> dict[str, Any]:
        """What decides the stream of rows, as JSON types."""
        ...

    def close(self) -> None:
        """End what works in the background."""
        ...
