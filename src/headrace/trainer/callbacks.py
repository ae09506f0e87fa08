"""Callbacks with the signature of transformers' ``TrainerCallback``.

Owns the order of events and what callbacks see. The invariant: a callback can ask through
``control`` for a log, an evaluation, a save or a stop, and can change nothing else. ``args`` has
every attribute of ``TrainingArguments`` (transformers' default where headrace has no such key),
``state`` is transformers' own, ``model`` is the model on the meta device: its configuration and
shapes, not its weights. So transformers' integrations (TensorBoard, W&B, MLflow, Trackio) work.
"""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

from transformers import TrainingArguments
from transformers.trainer_callback import (
    ExportableState,
    TrainerCallback,
    TrainerControl,
    TrainerState,
)

from headrace.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.parallel.ranks import Ranks
    from headrace.trainer.config import TrainConfig

_WISHES = (
    "should_log", "should_evaluate", "should_save", "should_training_stop", "should_epoch_stop",
)  # fmt: skip


def _defaults() -> dict[str, Any]:
    values = {}
    for field in dataclasses.fields(TrainingArguments):
        if field.default is not dataclasses.MISSING:
            values[field.name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            values[field.name] = field.default_factory()
    return values


class ArgumentsView:
    """What callbacks get as ``args``.

    ``TrainingArguments`` itself would choose devices and need accelerate.
    """

    def __init__(self, config: TrainConfig) -> None:
        given = config.to_dict()
        vars(self).update(_defaults())
        vars(self).update({key: value for key, value in given.items() if key != "engine"})
        self.output_dir = str(config.output_dir)
        self.run_name = config.run_name or config.output_dir.resolve().name
        self.eval_strategy = config.evaluates
        self.train_batch_size = config.per_device_train_batch_size
        self.eval_batch_size = config.per_device_eval_batch_size
        self.metric_for_best_model = "eval_loss"
        self.greater_is_better = False
        self._given = given

    def to_dict(self) -> dict[str, Any]:
        """The resolved configuration."""
        return dict(self._given)

    def to_json_string(self) -> str:
        """The resolved configuration as JSON."""
        return json.dumps(self._given, indent=2)

    def to_sanitized_dict(self) -> dict[str, Any]:
        """The resolved configuration, values that trackers cannot hold as text."""
        plain = (bool, int, float, str)
        return {k: v if isinstance(v, plain) else str(v) for k, v in self._given.items()}


class Callbacks:
    """Calls every callback of an event, in order.

    Attributes:
        control: what callbacks asked for.
        state: what they see of the run.
    """

    def __init__(
        self,
        callbacks: Sequence[TrainerCallback],
        *,
        config: TrainConfig,
        state: TrainerState,
        model: Any,
        tokenizer: Any,
        is_main: bool = True,
    ) -> None:
        """Begin without wishes.

        Args:
            callbacks: to call.
            config: of the run.
            state: what they see of it.
            model: on the meta device.
            tokenizer: of the run.
            is_main: of several ranks, the others call nobody, and take over what was asked for.
        """
        self.control = TrainerControl()
        self.state = state
        self._callbacks = [*callbacks, *integrations(config.report_to)] if is_main else []
        self._args = ArgumentsView(config)
        state.is_world_process_zero = state.is_local_process_zero = is_main
        self._given = {
            "model": model,
            "processing_class": tokenizer,
            "optimizer": None,
            "lr_scheduler": None,
            "train_dataloader": None,
            "eval_dataloader": None,
        }

    def fire(self, event: str, **kwargs: Any) -> None:
        """Call ``event`` of every callback; one that returns a control replaces ours."""
        for callback in self._callbacks:
            result = getattr(callback, event)(
                self._args, self.state, self.control, **self._given, **kwargs
            )
            if result is not None:
                self.control = result

    def new_step(self) -> None:
        """Forget what was asked for at the step before."""
        self.control.should_log = False
        self.control.should_evaluate = False
        self.control.should_save = False

    def agree(self, ranks: Ranks) -> None:
        """Take over what the main rank's callbacks ask for."""
        if ranks.size > 1:
            wishes = ranks.table([bool(getattr(self.control, name)) for name in _WISHES])[0]
            for name, wish in zip(_WISHES, wishes, strict=True):
                setattr(self.control, name, bool(wish))

    def exported(self) -> dict[str, Any]:
        """State of the callbacks that have any, as JSON types, by class name."""
        return {
            type(callback).__name__: callback.state()
            for callback in self._callbacks
            if isinstance(callback, ExportableState)
        }

    def restore(self, exported: dict[str, Any]) -> None:
        """Give callbacks back the attributes they exported."""
        for callback in self._callbacks:
            saved = exported.get(type(callback).__name__)
            if saved is not None and isinstance(callback, ExportableState):
                for name, value in {**saved["args"], **saved["attributes"]}.items():
                    setattr(callback, name, value)


def integrations(names: Sequence[str]) -> list[TrainerCallback]:
    """Transformers' callbacks for trackers.

    Raises:
        ConfigError: an unknown tracker, or one that is not installed.
    """
    if not names:
        return []
    from transformers.integrations import (  # noqa: PLC0415 - seconds of imports for trackers
        get_reporting_integration_callbacks,
    )

    made = []
    for name in names:
        try:
            (kind,) = get_reporting_integration_callbacks([name])
            made.append(kind())
        except ValueError as error:
            raise ConfigError(f"report_to: {error}", remedy="report_to: tensorboard") from error
        except (RuntimeError, ImportError) as error:
            raise ConfigError(
                f"report_to: {name} cannot be used: {error}", remedy=f"pip install {name}"
            ) from error
    return made
