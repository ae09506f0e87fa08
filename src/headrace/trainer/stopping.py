"""Callbacks that end a run before its last step, by keys of the configuration."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from transformers.trainer_callback import EarlyStoppingCallback, ExportableState, TrainerCallback

if TYPE_CHECKING:
    from headrace.trainer.config import TrainConfig


class EarlyStop(EarlyStoppingCallback):  # type: ignore[misc]  # transformers is untyped
    """transformers' own, which compares with the lowest loss; what ends is saved, not the best."""

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """As transformers', which warns that the best checkpoint will not be loaded."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            super().on_train_begin(*args, **kwargs)


class LossWatchdog(TrainerCallback, ExportableState):  # type: ignore[misc]  # as above
    """Ends a run whose logged loss stays above a threshold (axolotl's ``loss_watchdog``).

    Args:
        threshold: nats a token.
        patience: rows above it, one after the other.
    """

    def __init__(self, threshold: float, patience: int) -> None:
        self.threshold = threshold
        self.patience = patience
        self.violations = 0

    def on_log(self, _args: Any, _state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Count, and ask for the end."""
        loss = (logs or {}).get("loss")
        if loss is not None:
            self.violations = self.violations + 1 if loss > self.threshold else 0
            control.should_training_stop |= self.violations >= self.patience

    def state(self) -> dict[str, Any]:
        """What a resume needs."""
        return {
            "args": {"threshold": self.threshold, "patience": self.patience},
            "attributes": {"violations": self.violations},
        }


def stopping_callbacks(config: TrainConfig) -> list[TrainerCallback]:
    """The callbacks that the configuration asks for."""
    found: list[TrainerCallback] = []
    if config.early_stopping_patience is not None:
        found.append(EarlyStop(early_stopping_patience=config.early_stopping_patience))
    if config.loss_watchdog_threshold is not None:
        found.append(LossWatchdog(config.loss_watchdog_threshold, config.loss_watchdog_patience))
    return found
