"""Keys that say which model is trained, and which part of it.

The first keys of a training file; :class:`headrace.trainer.config.TrainConfig` adds the others.
Adapters have axolotl's names. Reads no model: a pattern is checked against one in ``preflight``.
"""

from __future__ import annotations

import re
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from headrace.errors import ConfigError
from headrace.models.lora import ALL_LINEAR, LoraSettings

_RANGE = re.compile(r"\[\d*:\d*\]$")


class ModelKeys(BaseModel):
    """The model's keys; each field is a key of the YAML file."""

    model_config = ConfigDict(use_attribute_docstrings=True, protected_namespaces=())

    model_name_or_path: str | None = None
    """Folder (or name in the local hub cache) whose weights training starts from."""
    scratch_config: str | dict[str, Any] | None = Field(default=None, alias="model_config")
    """Start from random weights instead: a config.json, its folder, or its contents."""
    tokenizer_name_or_path: str | None = None
    """Tokenizer folder or cached name; the model's own by default."""
    gguf_file: str | None = None
    """Name of a GGUF file in model_name_or_path to read the weights from."""
    trust_remote_code: bool = False
    """Run Python code that ships with the model."""
    eos_token: str | None = None
    """Token that ends a document, for tokenizers that name none."""
    special_tokens: dict[str, str] = Field(default_factory=dict)
    """Other special tokens by name, such as {bos_token: <s>}; each must be one of its tokens."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Working weights; the master weights are float32 either way."""

    router_aux_loss_coef: float | None = Field(default=None, ge=0)
    """Weight of the loss that balances a mixture's experts; None leaves it to config.json."""

    adapter: Literal["lora"] | None = None
    """Train low-rank adapters beside the model, whose own weights stay as they are."""
    lora_r: int | None = Field(default=None, ge=1)
    """Rank of the adapters; 8 by default."""
    lora_alpha: float | None = Field(default=None, gt=0)
    """Adapters are scaled by lora_alpha / lora_r; twice lora_r by default."""
    lora_dropout: float | None = Field(default=None, ge=0, lt=1)
    """Share of A's input that training drops, as in PEFT; 0, or lora_model_dir's, by default."""
    lora_target_modules: str | list[str] | None = None
    """What gets adapters, as in PEFT: names, a regular expression, or all-linear (default)."""
    lora_target_parameters: list[str] | None = None
    """Parameters of stacked experts that get an adapter an expert, as in PEFT, by what their names
    end with (mlp.experts.gate_up_proj); other adapters only with lora_target_modules besides."""
    lora_target_linear: bool | None = None
    """The same as lora_target_modules: all-linear; names given besides must be among them."""
    lora_modules_to_save: list[str] | None = None
    """Modules that are trained whole and saved with the adapters."""
    lora_model_dir: str | None = None
    """Folder of an adapter, in PEFT's format, that training starts from."""
    peft_layers_to_transform: int | list[int] | None = None
    """Numbers of the layers that get adapters; all by default."""
    peft_use_rslora: bool | None = None
    """Scale by lora_alpha / sqrt(lora_r)."""
    peft_init_lora_weights: Literal[True, "gaussian"] | None = None
    """How A begins: true as PEFT, or gaussian; B is zero."""
    unfrozen_parameters: list[str] = Field(default_factory=list)
    """Train only parameters whose names match one of these regular expressions from the start."""
    frozen_parameters: list[str] = Field(default_factory=list)
    """Leave parameters as they are whose names match one of these from the start."""

    @field_validator("adapter", mode="before")
    @classmethod
    def _only_lora(cls, value: Any) -> Any:
        if value not in (None, "", "lora"):
            raise ConfigError(
                f"adapter: {value!r} is refused: headrace has LoRA on unquantised models, at 2 "
                "bytes a parameter in host memory",
                remedy="adapter: lora",
            )
        return value or None

    @field_validator("lora_target_parameters", "lora_modules_to_save", mode="before")
    @classmethod
    def _names(cls, value: Any, info: Any) -> Any:
        if isinstance(value, str):  # as LLaMA-Factory writes lists
            value = [name.strip() for name in value.split(",")]
        if isinstance(value, list) and "" in value:
            raise ConfigError(
                f"{info.field_name}: {value!r} holds an empty name, which every name ends with",
                remedy="remove it",
            )
        return value

    @field_validator("unfrozen_parameters", "frozen_parameters", mode="before")
    @classmethod
    def _patterns(cls, value: Any, info: Any) -> Any:
        value = [] if value is None else [value] if isinstance(value, str) else value
        for pattern in value if isinstance(value, list) else []:
            if not isinstance(pattern, str):
                continue
            if _RANGE.search(pattern):
                raise ConfigError(
                    f"{info.field_name}: {pattern!r} names rows of a parameter, and headrace "
                    "trains or freezes parameters whole",
                    remedy=f"{_RANGE.sub('', pattern)!r}",
                )
            try:
                re.compile(pattern)
            except re.error as error:
                raise ConfigError(
                    f"{info.field_name}: {pattern!r} is no regular expression: {error}",
                    remedy="escape what is meant literally: \\. for a dot, \\[ for a bracket",
                ) from error
        return value

    @model_validator(mode="after")
    def _check_adapter(self) -> Self:
        given = [
            name
            for name in ModelKeys.model_fields
            if name.startswith(("lora_", "peft_")) and getattr(self, name) not in (None, False, [])
        ]
        if self.adapter is None and given:
            raise ConfigError(
                f"{given[0]} has no effect without an adapter",
                remedy="adapter: lora, or remove it",
            )
        if self.adapter is not None:
            if self.model_name_or_path is None:
                raise ConfigError(
                    "adapter: lora needs the model it belongs to, and model_config is random",
                    remedy="model_name_or_path:",
                )
            if self.unfrozen_parameters or self.frozen_parameters:
                raise ConfigError(
                    "adapter: lora freezes the model, so unfrozen_parameters and "
                    "frozen_parameters have no effect",
                    remedy="lora_modules_to_save names what is trained besides",
                )
            self.lora_settings()  # refuses what no model could have
        return self

    def lora_settings(self) -> LoraSettings | None:
        """Which adapters are trained, or None when there are none."""
        if self.adapter is None:
            return None
        rank = 8 if self.lora_r is None else self.lora_r
        layers = self.peft_layers_to_transform
        parameters = tuple(self.lora_target_parameters or ())
        targets = self.lora_target_modules or (() if parameters else ALL_LINEAR)
        if self.lora_target_linear:
            targets = ALL_LINEAR
        return LoraSettings(
            rank=rank,
            alpha=2.0 * rank if self.lora_alpha is None else self.lora_alpha,
            target_modules=targets if isinstance(targets, str) else tuple(targets),
            target_parameters=parameters,
            dropout=self.lora_dropout or 0.0,
            layers=None
            if layers is None
            else (layers,)
            if isinstance(layers, int)
            else tuple(layers),
            use_rslora=bool(self.peft_use_rslora),
            initialisation="gaussian" if self.peft_init_lora_weights == "gaussian" else "default",
            modules_to_save=tuple(self.lora_modules_to_save or ()),
        )

    def is_trained(self, name: str) -> bool:
        """Whether the patterns leave a parameter to be trained."""
        if self.unfrozen_parameters and not _matches(self.unfrozen_parameters, name):
            return False
        return not _matches(self.frozen_parameters, name)


def _matches(patterns: list[str], name: str) -> bool:
    return any(re.match(pattern, name) for pattern in patterns)
