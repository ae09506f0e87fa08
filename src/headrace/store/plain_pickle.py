"""Reads a pickle of known plain records without running it.

A small machine over the opcodes: text, integers, tuples, lists, dictionaries, and the globals that
the caller names, which become inert :class:`Record` values. Nothing is imported and nothing is
called. Anything else (another global, another opcode, a persistent id) refuses the file with what
was found. Work and memory are linear in the size of the file. It writes no pickles.
"""

from __future__ import annotations

import io
import pickletools
from typing import TYPE_CHECKING, Any

from headrace.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_VALUES = frozenset(
    {
        "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "BINUNICODE8",
        "SHORT_BINUNICODE",
    }
)  # fmt: skip
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY: dict[str, Callable[[], Any]] = {
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class Name:
    """A global that the caller knows, by the short name given to it."""

    def __init__(self, kind: str) -> None:
        self.kind = kind


class Record:
    """What a pickle makes of a known global: its arguments and its state, as written.

    Attributes:
        kind: the global's short name.
        arguments: of its construction.
        state: set afterwards, or None.
    """

    def __init__(self, kind: str, arguments: tuple[Any, ...]) -> None:
        self.kind = kind
        self.arguments = arguments
        self.state: Any = None

    def field(self, name: str) -> Any:
        """One attribute of its state; None if it has none of that name."""
        return self.state.get(name) if isinstance(self.state, dict) else None


_MARK = object()


def read_pickle(data: bytes, known: Mapping[str, str], source: str) -> Any:
    """The value of a pickle made of plain values and known records.

    Args:
        data: the whole pickle.
        known: short name by ``module.qualified_name``.
        source: the file, for messages.

    Raises:
        CheckpointError: it is damaged, or holds anything else.
    """
    try:
        return _Machine(known, source).run(data)
    except CheckpointError:
        raise
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError) as error:
        raise CheckpointError(
            f"{source} is damaged: {type(error).__name__}: {error}",
            remedy="copy it again; its last byte must be there",
        ) from error


class _Machine:
    def __init__(self, known: Mapping[str, str], source: str) -> None:
        self._known = known
        self._source = source
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self, data: bytes) -> Any:
        for opcode, argument in _operations(data):
            if opcode == "STOP":
                break
            self._step(opcode, argument)
        (value,) = self._stack
        return value

    def _step(self, opcode: str, argument: Any) -> None:
        stack = self._stack
        if opcode in _VALUES:
            stack.append(argument)
        elif opcode in _CONSTANTS:
            stack.append(_CONSTANTS[opcode])
        elif opcode in _EMPTY:
            stack.append(_EMPTY[opcode]())
        elif opcode in _TUPLES:
            count = _TUPLES[opcode]
            stack[-count:] = [tuple(self._last(count))]
        elif opcode == "TUPLE":
            stack.append(tuple(self._to_mark()))
        elif opcode == "MARK":
            stack.append(_MARK)
        elif opcode == "MEMOIZE":
            self._memo[len(self._memo)] = stack[-1]
        elif opcode in {"BINPUT", "LONG_BINPUT"}:
            self._memo[argument] = stack[-1]
        elif opcode in {"BINGET", "LONG_BINGET"}:
            stack.append(self._memo[argument])
        elif opcode in {"APPEND", "APPENDS"}:
            values = self._to_mark() if opcode == "APPENDS" else [stack.pop()]
            self._top(list).extend(values)
        elif opcode in {"SETITEM", "SETITEMS"}:
            values = self._to_mark() if opcode == "SETITEMS" else self._pop(2)
            self._top(dict).update(zip(values[::2], values[1::2], strict=True))
        elif opcode in {"GLOBAL", "STACK_GLOBAL"}:
            parts = self._pop(2) if opcode == "STACK_GLOBAL" else argument.split(" ")
            stack.append(self._global(parts))
        elif opcode in {"REDUCE", "NEWOBJ"}:
            name, arguments = self._pop(2)
            self._build(name, arguments)
        elif opcode == "BUILD":
            state = stack.pop()
            self._top(Record).state = state
        elif opcode not in {"PROTO", "FRAME"}:
            raise self._refusal(f"the operation {opcode}")

    def _global(self, parts: list[Any]) -> Name:
        full = ".".join(str(part) for part in parts)
        if full not in self._known:
            raise self._refusal(f"the global {full}")
        return Name(self._known[full])

    def _build(self, name: Any, arguments: Any) -> None:
        if not isinstance(name, Name) or not isinstance(arguments, tuple):
            raise self._refusal("a call of something that is no known record")
        self._stack.append(Record(name.kind, arguments))

    def _last(self, count: int) -> list[Any]:
        if len(self._stack) < count:
            raise IndexError("the stack is empty")
        return self._stack[-count:]

    def _pop(self, count: int) -> list[Any]:
        values = self._last(count)
        del self._stack[-count:]
        return values

    def _top(self, kind: type) -> Any:
        if not isinstance(self._stack[-1], kind):
            raise self._refusal(f"a change of a {type(self._stack[-1]).__name__}")
        return self._stack[-1]

    def _to_mark(self) -> list[Any]:
        values = []
        while (value := self._stack.pop()) is not _MARK:
            values.append(value)
        return values[::-1]

    def _refusal(self, found: str) -> CheckpointError:
        return CheckpointError(
            f"{self._source} holds {found}, which no known checkpoint does; nothing of it was run",
            remedy="use it only if you trust where it comes from, and then save it again with "
            "torch.distributed.checkpoint",
        )


def _operations(data: bytes) -> Iterator[tuple[str, Any]]:
    for opcode, argument, _ in pickletools.genops(io.BytesIO(data)):
        yield opcode.name, argument
