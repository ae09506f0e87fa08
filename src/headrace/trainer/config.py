"""The configuration of a run: its keys, their checks, the settings made of them.

Owns the names that users write; they are those of transformers' ``TrainingArguments`` wherever
it has one. The only module that knows pydantic: the parts of the trainer take frozen
dataclasses that :class:`TrainConfig` builds (files and overrides are ``config_file.py``). The
invariant: every key is honoured, translated with a note, or refused. Reads no data and no model.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, get_type_hints

import yaml
from pydantic import ConfigDict, Field, ValidationError, field_validator, model_validator

from headrace.data.batching import LoaderSettings
from headrace.data.sources import DatasetSource
from headrace.engine.config import AdamWConfig, EngineConfig, ParamGroup
from headrace.errors import ConfigError
from headrace.trainer.aliases import override_aliases, translate, translate_data
from headrace.trainer.config_file import apply_override, read_yaml, refuse_unknown
from headrace.trainer.data_keys import DataKeys
from headrace.trainer.model_keys import ModelKeys
from headrace.trainer.schedule import Schedule, ScheduleSettings, resolve_warmup
from headrace.units import parse_bytes, parse_memory

if TYPE_CHECKING:
    from collections.abc import Sequence

_NUMBERS = (int, float, int | None, float | None)


class TrainConfig(DataKeys, ModelKeys):
    """Everything about a training run; each field is a key of the YAML file."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        populate_by_name=True,
        protected_namespaces=(),
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    seed: int = Field(default=42, ge=-(2**63), lt=2**63)
    """Of the initialisation and of dropout, and of the data order unless data_seed is set."""
    data_seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    """Of the data order."""

    output_dir: Path
    """Folder of the run: config, metrics, checkpoints."""
    overwrite_output_dir: bool = False
    """Delete the checkpoints of an earlier run in output_dir when training starts."""
    run_name: str | None = None
    """Name for trackers; the name of output_dir by default."""

    per_device_train_batch_size: int = Field(default=8, ge=1)
    """Rows of a micro-batch."""
    per_device_eval_batch_size: int = Field(default=8, ge=1)
    """Rows of an evaluation micro-batch."""
    gradient_accumulation_steps: int = Field(default=1, ge=1)
    """Micro-batches of an optimizer step."""
    num_train_epochs: float = Field(default=3.0, gt=0)
    """Passes over the data."""
    max_steps: int = -1
    """Optimizer steps; above 0 it replaces num_train_epochs."""

    learning_rate: float = Field(default=5e-5, gt=0)
    """Peak learning rate."""
    lr_scheduler_type: str = "linear"
    """Shape of the learning rate, by transformers' name."""
    lr_scheduler_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Options of the schedule, such as min_lr."""
    warmup_steps: float = 0
    """Steps of linear warm-up; below 1, a share of the run."""
    warmup_ratio: float | None = None
    """Share of the run spent in warm-up."""
    optim: Literal["adamw"] = "adamw"
    """Optimizer."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled decay, on matrices only."""
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the first moment."""
    adam_beta2: float = Field(default=0.999, ge=0, lt=1)
    """Decay of the second moment."""
    adam_epsilon: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment."""
    max_grad_norm: float = Field(default=1.0, ge=0)
    """Limit of the 2-norm of the whole gradient; 0 for none."""
    param_groups: list[ParamGroup] = Field(default_factory=list)
    """Exceptions by parameter name: a list of {pattern, learning_rate_scale, weight_decay}."""

    logging_steps: float = Field(default=10, gt=0)
    """Steps between logged rows; below 1, a share of the run."""
    eval_strategy: Literal["no", "steps", "epoch"] | None = None
    """When to evaluate; steps if eval_steps is given, else epoch, if there is anything to."""
    eval_steps: float | None = Field(default=None, gt=0)
    """Steps between evaluations; below 1, a share of the run; logging_steps by default."""
    save_strategy: Literal["no", "steps", "epoch"] = "steps"
    """When to save; the end of training is always saved."""
    save_steps: float = Field(default=500, gt=0)
    """Steps between checkpoints; below 1, a share of the run."""
    save_total_limit: int | None = Field(default=None, ge=1)
    """Checkpoints to keep; older ones are deleted."""
    async_save: bool = True
    """Write checkpoints while training goes on; false makes training wait."""
    async_save_memory: int | None = Field(default=None, ge=0)
    """Host bytes for what is updated before it was written; the largest unit's state by default."""
    resume_from_checkpoint: bool | str = False
    """auto goes on from the last complete checkpoint of output_dir if there is one; or a path."""
    requeue: bool = False
    """When a signal stops the run, save and exit with 75 so that a scheduler starts it again."""
    early_stopping_patience: int | None = Field(default=None, ge=1)
    """Stop after this many evaluations whose loss is not below the lowest before."""
    loss_watchdog_threshold: float | None = Field(default=None, gt=0)
    """Stop when the loss of a logged row is above it loss_watchdog_patience times in a row."""
    loss_watchdog_patience: int = Field(default=1, ge=1)
    """Rows above loss_watchdog_threshold that stop the run."""
    report_to: list[str] = Field(default_factory=list)
    """Trackers, by transformers' names: tensorboard, wandb, mlflow, trackio, ..."""
    progress: Literal["auto", "live", "lines", "none"] = "auto"
    """Display: a live panel on a terminal, else one line an interval."""

    device: str = "auto"
    """cuda where there is one, else cpu."""
    engine: EngineConfig = Field(default_factory=EngineConfig)
    """How a step runs; nothing here changes its result beyond rounding."""
    tune_file: Path | None = None
    """What headrace tune wrote; by default CONFIG.tune.yaml beside CONFIG.yaml, if it is there."""

    @field_validator("*", mode="before")
    @classmethod
    def _no_switch_as_a_number(cls, value: Any, info: Any) -> Any:
        if isinstance(value, bool) and cls.model_fields[info.field_name].annotation in _NUMBERS:
            raise ValueError("Input should be a number, not true or false")
        return value

    @field_validator("logging_steps", "eval_steps", "save_steps", "warmup_steps")
    @classmethod
    def _count_or_share(cls, value: float | None) -> float | None:
        if value is not None and value > 1 and value != int(value):
            raise ValueError("Input should be a count of steps, or a share of the run below 1")
        return value

    @field_validator("output_dir", "data_cache_dir", "tune_file", mode="before")
    @classmethod
    def _expand_folder(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        if not value or "\0" in value:
            raise ValueError("Input should be the name of a folder")
        try:  # the shell leaves the ~ of output_dir=~/run alone
            return Path(value).expanduser()
        except RuntimeError as error:
            raise ValueError(str(error)) from error

    @field_validator("async_save_memory", mode="before")
    @classmethod
    def _check_bytes(cls, value: Any) -> Any:
        if value is None or isinstance(value, bool):
            return None
        return parse_memory(value, "async_save_memory")

    @field_validator("engine", mode="before")
    @classmethod
    def _check_engine(cls, value: Any) -> Any:
        if isinstance(value, dict):
            _check_keys(value, EngineConfig, "engine.")
            if "chunk_bytes" in value:
                value = {**value, "chunk_bytes": parse_bytes(value["chunk_bytes"])}
        return value

    @field_validator("datasets", "eval_datasets", "param_groups", mode="before")
    @classmethod
    def _check_entries(cls, value: Any, info: Any) -> Any:
        kind = ParamGroup if info.field_name == "param_groups" else DatasetSource
        for number, entry in enumerate(value if isinstance(value, list) else []):
            if isinstance(entry, dict):
                _check_keys(entry, kind, f"{info.field_name}.{number}.")
        return value

    @field_validator("report_to", mode="before")
    @classmethod
    def _list_of_trackers(cls, value: Any) -> Any:
        if value is None or value == "none":
            return []
        return [value] if isinstance(value, str) else value

    @field_validator("resume_from_checkpoint", mode="before")
    @classmethod
    def _resume_value(cls, value: Any) -> Any:
        return (
            False if value in (None, "", "false") else "auto" if value in (True, "true") else value
        )

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if (self.model_name_or_path is None) == (self.scratch_config is None):
            raise ConfigError(
                "a run starts either from model_name_or_path (trained weights) or from "
                "model_config (random weights); "
                + ("neither is given" if self.scratch_config is None else "both are given"),
                remedy="give exactly one",
            )
        if self.gguf_file is not None and self.model_name_or_path is None:
            raise ConfigError(
                "gguf_file has no effect without model_name_or_path",
                remedy="name the folder of the GGUF file as model_name_or_path",
            )
        if self.max_steps == 0 or self.max_steps < -1:
            raise ConfigError(
                f"max_steps is {self.max_steps}", remedy="a positive count, or -1 for epochs"
            )
        if not self.can_evaluate and (self.eval_steps or self.eval_strategy not in (None, "no")):
            raise ConfigError(
                "evaluation is asked for, but there are no eval_datasets and no val_set_size",
                remedy="give one of them, or remove eval_strategy and eval_steps",
            )
        if self.streams and (self.max_steps < 0 or "epoch" in (self.save_strategy, self.evaluates)):
            raise ConfigError(
                "a streamed run has no epochs: max_steps says how long it is, save_steps and "
                "eval_steps when something happens",
                remedy="max_steps: 1000, save_strategy: steps, eval_steps: 100",
            )
        stops_early = self.early_stopping_patience is not None
        if stops_early and not (self.has_eval_sets and self.evaluates != "no"):
            raise ConfigError(
                "early_stopping_patience has no effect without an evaluation",
                remedy="give eval_datasets or val_set_size, or remove it",
            )
        for where, scale, decay in self._decays():
            if scale * self.learning_rate * decay >= 1:
                raise ConfigError(
                    f"{where}: {decay:g} times the learning rate {scale * self.learning_rate:g} is "
                    "not below 1, so a step would decay weights through zero",
                    remedy="lower one of the two",
                )
        Schedule(self.schedule_settings(max(1, self.max_steps)))
        self.adamw()  # checks what it is made of
        return self

    def _decays(self) -> list[tuple[str, float, float]]:
        """Where a weight decay is set, the scale of the learning rate there, and the decay."""
        found = [("weight_decay", 1.0, self.weight_decay)]
        for number, group in enumerate(self.param_groups):
            decay = self.weight_decay if group.weight_decay is None else group.weight_decay
            found.append((f"param_groups.{number}", group.learning_rate_scale, decay))
        return found

    # -- settings of the parts -------------------------------------------------------------

    def loader_settings(self, *, pad_token_id: int, num_ranks: int = 1) -> LoaderSettings:
        """How rows become steps."""
        return LoaderSettings(
            micro_batch_size=self.per_device_train_batch_size,
            accumulation=self.gradient_accumulation_steps,
            num_ranks=num_ranks,
            drop_last=self.dataloader_drop_last,
            pad_to_multiple_of=self.pad_to_multiple_of,
            pad_token_id=pad_token_id,
        )

    def schedule_settings(self, num_steps: int) -> ScheduleSettings:
        """The learning rate of a run of ``num_steps``."""
        return ScheduleSettings(
            kind=self.lr_scheduler_type,
            learning_rate=self.learning_rate,
            num_steps=num_steps,
            num_warmup_steps=resolve_warmup(self.warmup_steps, self.warmup_ratio, num_steps),
            options=self.lr_scheduler_kwargs,
        )

    def adamw(self) -> AdamWConfig:
        """The optimizer's settings."""
        return AdamWConfig(
            beta1=self.adam_beta1,
            beta2=self.adam_beta2,
            eps=self.adam_epsilon,
            weight_decay=self.weight_decay,
            groups=tuple(self.param_groups),
        )

    @property
    def evaluates(self) -> Literal["no", "steps", "epoch"]:
        """When to evaluate, decided."""
        if self.eval_strategy is not None:
            return self.eval_strategy
        if not self.can_evaluate:
            return "no"
        return "steps" if self.eval_steps else "epoch"

    def to_dict(self) -> dict[str, Any]:
        """Every key with its value, as JSON types; :func:`resolve` accepts it again."""
        return self.model_dump(mode="json", by_alias=True)

    def chosen(self) -> dict[str, Any]:
        """The keys whose values are not their defaults, as JSON types."""
        return self.model_dump(mode="json", by_alias=True, exclude_defaults=True)

    def to_yaml(self) -> str:
        """The resolved configuration, in the order of the documentation."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True, width=100)


def resolve(
    source: str | Path | dict[str, Any] | TrainConfig, overrides: Sequence[str] = ()
) -> tuple[TrainConfig, list[str]]:
    """A checked configuration, and a note for every key that was translated.

    Args:
        source: a YAML file, its contents, or a configuration.
        overrides: ``key=value`` with dotted keys, values in YAML: ``engine.activations=recompute``,
            ``datasets.0.path=more.jsonl``.

    Raises:
        ConfigError: naming each key that is unknown, missing or wrong.
    """
    if isinstance(source, TrainConfig):
        source = source.to_dict()
    raw = read_yaml(Path(source)) if isinstance(source, (str, Path)) else dict(source)
    if strange := [key for key in raw if not isinstance(key, str)]:
        raise ConfigError(
            f"the key {strange[0]!r} is no name", remedy="headrace train --schema prints every key"
        )
    for override in overrides:
        override_aliases(raw, override.partition("=")[0])
        apply_override(raw, override)
    if isinstance(source, (str, Path)) and "tune_file" not in raw:
        beside = Path(source).with_suffix(".tune.yaml")
        if beside.is_file():
            raw["tune_file"] = str(beside)
    translated, notes = translate(raw)
    translate_data(raw, translated, notes)
    return checked(translated), notes


def checked(translated: dict[str, Any]) -> TrainConfig:
    """A configuration whose keys are canonical.

    Raises:
        ConfigError: naming each key that is unknown, missing or wrong.
    """
    refuse_unknown(translated, _keys(), "")
    try:
        return TrainConfig.model_validate(translated)
    except ValidationError as error:
        problems = [_describe(problem) for problem in error.errors()]
        raise ConfigError(
            "the configuration is not usable:\n  " + "\n  ".join(problems),
            remedy="headrace train --schema prints every key with its type and meaning",
        ) from error


def _keys() -> list[str]:
    return [field.alias or name for name, field in TrainConfig.model_fields.items()]


def _check_keys(given: dict[str, Any], kind: Any, where: str) -> None:
    """Refuse keys that ``kind`` lacks, and a switch where it has a number."""
    refuse_unknown(given, [field.name for field in dataclasses.fields(kind)], where)
    types = get_type_hints(kind)
    for name, value in given.items():
        if isinstance(value, bool) and types[name] in _NUMBERS:
            raise ValueError(f"{name} should be a number, not true or false")


def _describe(problem: Any) -> str:
    place = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "missing":
        return f"{place} is missing"
    return f"{place}: {problem['msg']} (got {problem['input']!r})"
