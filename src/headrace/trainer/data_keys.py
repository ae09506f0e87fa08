"""Keys that say what is trained on and how documents become rows.

:class:`headrace.trainer.config.TrainConfig` adds the others. What an entry of ``datasets`` may hold
is :class:`~headrace.data.sources.DatasetSource`. Reads no data.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from headrace.data.packing import RowSettings
from headrace.data.sources import DatasetSource
from headrace.errors import ConfigError


class DataKeys(BaseModel):
    """The data's keys; each field is a key of the YAML file."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    datasets: list[DatasetSource] = Field(min_length=1)
    """What to train on: a list of {path, type, weight, ...}; the keys are in docs/data.md."""
    eval_datasets: list[DatasetSource] = Field(default_factory=list)
    """What to evaluate on, each reported under its name."""
    val_set_size: float = Field(default=0.0, ge=0)
    """Documents of datasets held out to evaluate on: a share of them below 1, else a number."""
    lm_eval_tasks: list[str] = Field(default_factory=list)
    """Tasks of lm-evaluation-harness to score on the live weights at every evaluation."""
    lm_eval_limit: int | None = Field(default=None, ge=1)
    """Examples of each task; all by default."""
    lm_eval_include_path: str | None = None
    """Folder of tasks of your own."""
    max_length: int = Field(default=1024, ge=2)
    """Tokens a row can hold."""
    packing: bool = True
    """Put several documents in a row; they do not see each other."""
    packing_strategy: Literal["bfd_split", "wrapped"] = "bfd_split"
    """Keep documents whole where they fit, or cut one stream every max_length tokens."""
    excess_length: Literal["split", "truncate", "drop"] = "split"
    """What becomes of documents longer than max_length."""
    pad_to_multiple_of: int = Field(default=8, ge=1)
    """Lengths of unpacked micro-batches are rounded up to it."""
    shuffle: bool = True
    """Draw a new order every epoch."""
    chat_template: str | None = None
    """Of chat rows, and of the tokenizer that is saved: a name, a .jinja file or the template."""
    dataset_num_proc: int | None = Field(default=None, ge=0)
    """Processes that tokenise; as many as a dataset is worth by default."""
    data_cache_dir: Path | None = None
    """Where tokenised datasets are kept; ~/.cache/headrace by default."""
    dataloader_drop_last: bool = False
    """Leave out the rows at the end of an epoch that fill no whole step."""

    @model_validator(mode="after")
    def _check_datasets(self) -> Self:
        names = [source.label for source in self.eval_datasets]
        if len(set(names)) < len(names):
            raise ConfigError(
                f"two eval_datasets have the same name: {names}", remedy="give each a name:"
            )
        if self.val_set_size >= 1 and self.val_set_size != int(self.val_set_size):
            raise ConfigError(
                f"val_set_size is {self.val_set_size:g}", remedy="a share below 1, or a number"
            )
        for source in self.eval_datasets:
            if source.streaming:
                raise ConfigError(
                    f"evaluation set {source.label!r} is streamed; it is read again and again",
                    remedy="streaming: false there",
                )
        if self.streams and not all(source.streaming for source in self.datasets):
            raise ConfigError(
                "some datasets are streamed and some are not",
                remedy="streaming: true on all of datasets, or on none",
            )
        if self.streams and self.val_set_size:
            raise ConfigError(
                "val_set_size holds out documents of tokenised datasets, and these are streamed",
                remedy="put documents in a file of their own and name it under eval_datasets:",
            )
        self.row_settings()  # refuses what it cannot do
        return self

    @property
    def streams(self) -> bool:
        """Whether datasets are read while training."""
        return any(source.streaming for source in self.datasets)

    @property
    def has_eval_sets(self) -> bool:
        """Whether there are documents to evaluate on."""
        return bool(self.eval_datasets or self.val_set_size)

    @property
    def can_evaluate(self) -> bool:
        """Whether there is anything to evaluate on."""
        return self.has_eval_sets or bool(self.lm_eval_tasks)

    def row_settings(self) -> RowSettings:
        """How documents become rows."""
        return RowSettings(
            max_length=self.max_length,
            packing=self.packing,
            packing_strategy=self.packing_strategy,
            excess_length=self.excess_length,
        )
