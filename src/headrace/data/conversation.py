"""Conversations as chat templates expect them, from the shapes that people have.

Owns the way from a row to a list of messages: OpenAI's ``messages``, ShareGPT's ``conversations``
with ``from`` and ``value``, instruction columns, prompt and completion as lists of messages. The
invariant: a message keeps every property the template may read, gets a role that templates
know, and carries apart whether it is supervised. Renders nothing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headrace.data.rows import bad_row, checked_text

if TYPE_CHECKING:
    from collections.abc import Iterable

    from headrace.data.rows import Place
    from headrace.data.sources import DatasetSource

_ROLES = {
    "assistant": ("assistant", "gpt", "model", "chatgpt", "bot"),
    "function_call": ("function_call",),  # ShareGPT's: an assistant's turn that calls tools
    "user": ("user", "human"),
    "system": ("system", "developer"),
    "tool": ("tool", "observation", "function", "ipython", "function_response"),
}
_WRITE = "write a list of {role, content}, or name its column with field_messages:"


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """A row, ready to be rendered.

    Attributes:
        messages: with ``role`` and ``content`` and whatever else the template reads.
        supervised: one flag a message.
        everything: headers too, unless a message says that it is not supervised.
        tools: descriptions of tools, or ``None``.
    """

    messages: list[dict[str, Any]]
    supervised: list[bool]
    everything: bool = False
    tools: list[Any] | None = None


_MEDIA = ("images", "image", "videos", "video", "audios", "audio")


@dataclass(frozen=True)
class ConversationReader:
    """Makes conversations of the rows of one dataset.

    Attributes:
        source: the dataset.
        roles: role that templates know, by the name in the data.
    """

    source: DatasetSource
    roles: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        known = {name: role for role, names in _ROLES.items() for name in names}
        given = {name: role for role, names in self.source.roles.items() for name in names}
        object.__setattr__(self, "roles", known | given)

    def read(self, place: Place, row: dict[str, Any]) -> Conversation:
        """The conversation of a row of ``messages``, ``instruction`` or ``prompt_completion``.

        Raises:
            DataError: naming what of the row is not usable.
        """
        for column in _MEDIA:
            if row.get(column):
                raise bad_row(
                    place,
                    f"the row has {column!r}, and headrace trains on text alone",
                    "drop the column, and turns that speak of it",
                )
        if self.source.type == "instruction":
            return self._of_instruction(place, row)
        if self.source.type == "prompt_completion":
            return self._of_prompt(place, row)
        column = self.source.field_messages or (
            "messages" if "messages" in row or "conversations" not in row else "conversations"
        )
        pairs = [self._message(place, column, turn) for turn in _turns(place, column, row)]
        messages = [message for message, _ in pairs]
        supervised = [
            self.source.train_on_inputs or message["role"] in self.source.roles_to_train
            if flag is None
            else flag
            for message, flag in pairs
        ]
        self._add_system(place, row, messages, supervised)
        return Conversation(
            messages=messages,
            supervised=supervised,
            everything=self.source.train_on_inputs,
            tools=_tools(place, row, self.source),
        )

    def _of_prompt(self, place: Place, row: dict[str, Any]) -> Conversation:
        messages: list[dict[str, Any]] = []
        supervised: list[bool] = []
        for column in (self.source.field_prompt, self.source.field_completion):
            for turn in _turns(place, column, row):
                messages.append(self._message(place, column, turn)[0])
                supervised.append(
                    self.source.train_on_inputs or column == self.source.field_completion
                )
        return Conversation(
            messages=messages,
            supervised=supervised,
            everything=self.source.train_on_inputs,
            tools=_tools(place, row, self.source),
        )

    def _of_instruction(self, place: Place, row: dict[str, Any]) -> Conversation:
        source = self.source
        messages: list[dict[str, Any]] = []
        history = (row.get(source.field_history) or []) if source.field_history else []
        if not isinstance(history, list):
            raise bad_row(
                place, f"{source.field_history!r} is no list", "write a list of [prompt, answer]"
            )
        for pair in history:
            if not isinstance(pair, list | tuple) or len(pair) != 2:
                raise bad_row(
                    place,
                    f"{source.field_history!r} holds {pair!r}",
                    "a history is a list of [prompt, answer]",
                )
            messages += [
                {"role": "user", "content": pair[0]},
                {"role": "assistant", "content": pair[1]},
            ]
        instruction, given, output = instruction_columns(place, row, source)
        content = "\n".join(text for text in (instruction, given) if text)
        messages += [
            {"role": "user", "content": content},
            {"role": "assistant", "content": output},
        ]
        supervised = [
            source.train_on_inputs or message["role"] in source.roles_to_train
            for message in messages
        ]
        self._add_system(place, row, messages, supervised)
        return Conversation(
            messages=messages, supervised=supervised, everything=source.train_on_inputs
        )

    def _add_system(
        self,
        place: Place,
        row: dict[str, Any],
        messages: list[dict[str, Any]],
        supervised: list[bool],
    ) -> None:
        text = system_text(place, row, self.source)
        if text and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": text})
            supervised.insert(0, self.source.train_on_inputs)

    def _message(
        self, place: Place, column: str, turn: dict[str, Any]
    ) -> tuple[dict[str, Any], bool | None]:
        """A message for the template, and whether it says itself if it is supervised."""
        named = self.source.message_property_mappings
        role_key = named.get("role") or ("role" if "role" in turn or "from" not in turn else "from")
        content_key = named.get("content") or (
            "content" if "content" in turn or "value" not in turn else "value"
        )
        role = turn.get(role_key)
        if not isinstance(role, str) or role not in self.roles:
            known = ", ".join(sorted(self.roles))
            raise bad_row(
                place,
                f"{column!r} has a message whose {role_key} is {role!r}",
                f"use one of {known}, or name it under roles:",
            )
        flag = _flag(place, turn, self.source.message_field_training)
        taken = {role_key, content_key, self.source.message_field_training, "weight"}
        # Columns of structs hold null for every property that another message has.
        message = {k: v for k, v in turn.items() if k not in taken and v is not None}
        for target, given in named.items():
            if target not in {"role", "content"} and turn.get(given) is not None:
                message.pop(given, None)
                message[target] = turn[given]
        column = f"{column}.{content_key}"
        content = _content(place, column, turn.get(content_key), self.roles[role])
        message = {"role": self.roles[role], "content": content or "", **message}
        if message["role"] == "function_call":
            calls = _function_calls(place, content)
            message |= {"role": "assistant", "content": "", "tool_calls": calls}
        elif content is None and "tool_calls" not in message:
            raise bad_row(place, f"a message has no {column!r}", _WRITE)
        if "tool_calls" in message:
            message["tool_calls"] = _parsed_calls(place, message["tool_calls"])
        return message, flag


def _turns(place: Place, column: str, row: dict[str, Any]) -> list[dict[str, Any]]:
    if column not in row:
        have = ", ".join(map(repr, row)) or "nothing"
        raise bad_row(place, f"the row has no {column!r} (it has {have})", _WRITE)
    turns = row[column]
    if not isinstance(turns, list) or not turns or not all(isinstance(t, dict) for t in turns):
        raise bad_row(place, f"{column!r} is no list of messages", _WRITE)
    return turns


def _flag(place: Place, turn: dict[str, Any], key: str) -> bool | None:
    flag = turn.get(key)
    if flag is None and turn.get("weight") in (0, 1):  # as in OpenAI's fine-tuning files
        return bool(turn["weight"])
    if flag is None or isinstance(flag, bool):
        return flag
    if flag in (0, 1):
        return bool(flag)
    raise bad_row(
        place,
        f"{key!r} of a message is {flag!r}",
        "true or false, or name another key with message_field_training:",
    )


def _tools(place: Place, row: dict[str, Any], source: DatasetSource) -> list[Any] | None:
    tools = row.get(source.field_tools)
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except (ValueError, RecursionError) as error:
            raise bad_row(
                place, f"{source.field_tools!r} is not JSON ({error})", "write a list of tools"
            ) from error
    if tools is not None and not isinstance(tools, list):
        raise bad_row(
            place, f"{source.field_tools!r} is {type(tools).__name__}", "write a list of tools"
        )
    return [_without_nulls(tool) for tool in tools] if tools else None


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None}
    return [_without_nulls(v) for v in value] if isinstance(value, list) else value


def _content(place: Place, column: str, value: Any, role: str) -> Any:
    """What a message says: text, or parts of text as one, which every template writes alike.

    Templates write anything else as Python would print it, or not at all.
    """
    if value is None:
        return None
    if isinstance(value, list):
        value = "".join(_part(place, column, part) for part in value)
    if isinstance(value, dict) and role == "tool":  # an answer of a tool, which templates dump
        return value
    return checked_text(place, column, value, _WRITE)


def _part(place: Place, column: str, part: Any) -> str:
    part = _without_nulls(part)
    text = part.get("text") if isinstance(part, dict) else part
    kind = part.get("type", "text") if isinstance(part, dict) else "text"
    if kind != "text" or not isinstance(text, str):
        raise bad_row(
            place,
            f"{column!r} has a part that is no text: {str(part)[:80]}",
            'headrace trains on text: write a string, or parts {"type": "text", "text": ...}',
        )
    return text


def _parsed_calls(place: Place, calls: Any) -> list[Any]:
    """Tool calls whose arguments are objects: templates write them as JSON themselves."""
    if not isinstance(calls, list):
        raise bad_row(place, "a message has tool_calls that are no list", _WRITE)
    parsed = []
    for given in calls:
        call = _without_nulls(given)
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise bad_row(
                place,
                f"a tool call is {str(given)[:80]}",
                'write {"function": {"name": ..., "arguments": {...}}}',
            )
        arguments = _object(function.get("arguments"))
        if "function" in call and arguments is not None:
            call = {**call, "function": {**function, "arguments": arguments}}
        parsed.append(call)
    return parsed


def _object(text: Any) -> dict[str, Any] | None:
    """The object that a JSON text holds, or ``None``."""
    try:
        found = json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _function_calls(place: Place, content: Any) -> list[dict[str, Any]]:
    """Tool calls of a ShareGPT turn of ``function_call``."""
    try:
        calls = json.loads(content)
        found = [calls] if isinstance(calls, dict) else calls
        return [
            {
                "type": "function",
                "function": {"name": call["name"], "arguments": call.get("arguments", {})},
            }
            for call in found
        ]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise bad_row(
            place, f"a function_call is {content!r}", 'write {"name": ..., "arguments": {...}}'
        ) from error


def system_text(place: Place, row: dict[str, Any], source: DatasetSource) -> str | None:
    """The system prompt of a row, or the dataset's."""
    text = row.get(source.field_system) if source.field_system else None
    if not text:
        return source.system_prompt
    return checked_text(place, str(source.field_system), text, "write a string")


def instruction_columns(
    place: Place, row: dict[str, Any], source: DatasetSource
) -> tuple[str, str, str]:
    """Instruction, input and output of a row; the input may be empty."""
    return (
        _column(place, row, source.field_instruction, "field_instruction"),
        _column(place, row, source.field_input, "field_input", optional=True),
        _column(place, row, source.field_output, "field_output"),
    )


def _column(
    place: Place, row: dict[str, Any], column: str, key: str, *, optional: bool = False
) -> str:
    text = row.get(column)
    if text is None and optional:
        return ""
    if column not in row:
        raise bad_row(
            place,
            f"the row has no {column!r} (it has {_names(row)})",
            f"set {key}: of this dataset to the column that holds it",
        )
    return checked_text(place, column, text, "write a string, or drop the row")


def _names(row: Iterable[str]) -> str:
    return ", ".join(map(repr, row)) or "nothing"
