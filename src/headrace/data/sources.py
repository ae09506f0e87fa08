"""What an entry of ``datasets:`` says: where rows lie and what a row becomes.

Owns the keys of an entry and what of them decides tokens (:meth:`DatasetSource.recipe`). Names
are axolotl's and TRL's where they have one. Reads no file.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from headrace.errors import ConfigError

RowType = Literal[
    "text", "tokens", "messages", "prompt_completion", "alpaca", "instruction", "segments"
]
# Types that a chat template renders; prompt_completion only where its columns hold messages.
CHAT_TYPES = ("messages", "instruction")

# Where a key has an effect; a key set elsewhere would be ignored, and is refused.
_ONLY_FOR: dict[str, tuple[str, ...]] = {
    "text_field": ("text",),
    "field_messages": ("messages",),
    "message_property_mappings": ("messages", "prompt_completion"),
    "message_field_training": ("messages",),
    "roles": ("messages", "prompt_completion"),
    "roles_to_train": ("messages", "instruction"),
    "train_on_eos": ("messages", "instruction", "prompt_completion"),
    "train_on_inputs": ("messages", "prompt_completion", "alpaca", "instruction"),
    "field_tools": ("messages", "prompt_completion"),
    "field_system": ("messages", "alpaca", "instruction"),
    "chat_template": ("messages", "prompt_completion", "instruction"),
    "chat_template_kwargs": ("messages", "prompt_completion", "instruction"),
    "field_prompt": ("prompt_completion",),
    "field_completion": ("prompt_completion",),
    "field_instruction": ("alpaca", "instruction"),
    "field_input": ("alpaca", "instruction"),
    "field_output": ("alpaca", "instruction"),
    "field_history": ("instruction",),
    "system_prompt": ("alpaca", "instruction"),
    "format": ("alpaca",),
    "no_input_format": ("alpaca",),
    "field_segments": ("segments",),
}
# Keys that say which rows there are or how they are called, not what a row becomes.
_NOT_OF_A_ROW = frozenset({"path", "weight", "name", "streaming"})


@dataclass(frozen=True, kw_only=True)
class DatasetSource:
    """One entry of ``datasets:``.

    Attributes:
        path: a file, a folder (searched with its subfolders), a glob pattern, a dataset saved by
            ``datasets`` (``save_to_disk``), or the name of one in the local hub cache.
        type: ``text``: a string a row. ``tokens``: ``input_ids`` and, if wanted, ``labels``.
            ``messages``: a conversation, through the chat template. ``prompt_completion``: two
            strings, or two lists of messages. ``alpaca``: instruction, input and output in
            Stanford Alpaca's prompt, or in ``format``. ``instruction``: the same columns through
            the chat template. ``segments``: a list of ``{text, label}``.
        weight: share of the tokens of the mixture; either all entries have one or none.
        name: how reports call it; the path by default.
        split: part of the dataset, such as ``train`` or ``train[:20%]``.
        max_samples: only the first rows.
        streaming: read, tokenise and pack while training; nothing is kept on the disk.
        date_field: the column of a document's date; evaluation then reports its loss by month.
        text_field: the column of a ``text`` row's string.
        field_messages: the column of the conversation; ``messages``, else ``conversations``.
        message_property_mappings: what a message calls its ``role`` and ``content``; ShareGPT's
            ``from`` and ``value`` are recognised.
        message_field_training: what a message calls the flag that says whether it is supervised.
        roles: other names of roles, ``{assistant: [gpt, model]}``; the usual ones are known.
        roles_to_train: whose turns are supervised.
        train_on_eos: supervise the end of ``turn`` (every supervised turn), ``all`` turns, the
            ``last`` turn, or ``none``.
        train_on_inputs: supervise everything, prompts too.
        field_tools: the column of tool descriptions.
        field_system: the column of a system prompt.
        chat_template: in place of the run's.
        chat_template_kwargs: variables for the template, such as ``enable_thinking``.
        field_prompt: the column of the prompt.
        field_completion: the column of the completion.
        field_instruction: the column of the instruction.
        field_input: the column of its input; may be absent or empty.
        field_output: the column of the answer.
        field_history: the column of earlier ``[prompt, answer]`` pairs.
        system_prompt: for rows without one of their own.
        format: the prompt with ``{instruction}``, ``{input}`` and ``{system}``.
        no_input_format: the prompt of rows without input.
        field_segments: the column of the segments.
    """

    path: str
    type: RowType = "text"
    weight: float | None = None
    name: str | None = None
    split: str | None = None
    max_samples: int | None = None
    streaming: bool = False
    date_field: str | None = None
    text_field: str = "text"
    field_messages: str | None = None
    message_property_mappings: dict[str, str] = field(default_factory=dict)
    message_field_training: str = "train"
    roles: dict[str, list[str]] = field(default_factory=dict)
    roles_to_train: list[str] = field(default_factory=lambda: ["assistant"])
    train_on_eos: Literal["turn", "all", "last", "none"] = "turn"
    train_on_inputs: bool = False
    field_tools: str = "tools"
    field_system: str | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    field_prompt: str = "prompt"
    field_completion: str = "completion"
    field_instruction: str = "instruction"
    field_input: str = "input"
    field_output: str = "output"
    field_history: str | None = None
    system_prompt: str | None = None
    format: str | None = None
    no_input_format: str | None = None
    field_segments: str = "segments"

    def __post_init__(self) -> None:
        defaults = _defaults()
        for key, types in _ONLY_FOR.items():
            if self.type not in types and getattr(self, key) != defaults[key]:
                raise ConfigError(
                    f"dataset {self.label!r}: {key} has no effect on rows of type {self.type}",
                    remedy=f"remove it, or set type: {' or '.join(types)}",
                )
        if self.max_samples is not None and self.max_samples < 1:
            raise ConfigError(
                f"dataset {self.label!r}: max_samples is {self.max_samples}",
                remedy="a positive number, or remove it for all rows",
            )

    @property
    def label(self) -> str:
        """What reports and messages call this dataset."""
        return self.name or self.path

    def recipe(self) -> dict[str, Any]:
        """What decides the tokens of its rows, as JSON types."""
        known = _ONLY_FOR.get
        return {
            key: value
            for key, value in asdict(self).items()
            if key not in _NOT_OF_A_ROW and self.type in known(key, (self.type,))
        }


def _defaults() -> dict[str, Any]:
    found = {}
    for name, entry in DatasetSource.__dataclass_fields__.items():
        factory: Any = entry.default_factory
        found[name] = factory() if callable(factory) else entry.default
    return found
