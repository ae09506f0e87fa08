"""Compiled functions that fall back to eager ones, and the count of both.

Owns what ``torch.compile`` is asked for and what happens when it cannot. Invariants: each function
has a code object of its own, because the compiler's recompile limit counts per code object; a call
that was to be compiled and ran eagerly is counted under its reason, and each reason is logged once.
Decides neither what is compiled nor what is right to run instead: the caller brings both.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from headrace.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

Function: TypeAlias = Callable[..., Any]

_logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class CompileCounts:
    """What became of the functions of one model that were to be compiled.

    Attributes:
        graphs: compiled so far, a forward with its backward as one.
        recompilations: those of a function that had a graph for the same way of calling it (with
            or without gradients, packed or not): as a rule another shape.
        eager_calls: calls that ran eagerly although compiling was asked for, by reason.
    """

    graphs: int = 0
    recompilations: int = 0
    eager_calls: dict[str, int] = field(default_factory=dict)

    def row(self) -> dict[str, int]:
        """The counts as three numbers."""
        return {
            "graphs": self.graphs,
            "recompilations": self.recompilations,
            "eager_calls": sum(self.eager_calls.values()),
        }


class Compiler:
    """Compiles the functions of one model.

    Attributes:
        counts: what became of them.
    """

    def __init__(self, backend: str) -> None:
        """Compile with ``backend``, a name that ``torch.compile`` knows.

        Raises:
            ConfigError: it knows none of that name.
        """
        # A custom backend is public; finding a named one is what torch's guide to them shows.
        from torch._dynamo import list_backends, lookup_backend  # noqa: PLC0415 - takes a second
        from torch._dynamo.exc import InvalidBackend  # noqa: PLC0415 - as above

        try:
            self._backend = lookup_backend(backend)
        except InvalidBackend as error:
            raise ConfigError(
                f"engine.compile_backend is {backend!r}, which this torch does not have",
                remedy=f"one of {', '.join(sorted(list_backends(exclude_tags=())))}",
            ) from error
        self.counts = CompileCounts()

    def compile(
        self,
        function: Function,
        name: str,
        *,
        eager: Function | None = None,
        tune: bool = False,
        **patches: Any,
    ) -> Function:
        """``function`` compiled at its first call, whole, for the shapes of each call.

        Args:
            function: of tensors and containers of them, or a partial of one.
            name: what its code is called in profiles and messages.
            eager: what runs instead where it cannot be compiled; ``function`` by default. May be
                compiled itself.
            tune: time the pointwise kernels and reductions in several shapes and take the fastest,
                unless results must not depend on timings (``deterministic``).
            patches: of ``torch._dynamo.config`` while it is called.
        """
        backend = functools.partial(self._count_graph, tune=tune)
        compiled = torch.compile(
            own_code(function, name), fullgraph=True, dynamic=False, backend=backend
        )
        return _CompiledFunction(compiled, eager or function, name, self.counts, patches)

    def _count_graph(self, graph: Any, inputs: Any, *, tune: bool) -> Any:
        """The backend, counted. Runs when something is compiled, never in a call of it."""
        with _backward_at_once(), _tuned(tune):
            compiled = self._backend(graph, inputs)
        self.counts.graphs += 1
        return compiled


class _CompiledFunction:
    """One compiled function with what runs in its place when it cannot be compiled."""

    def __init__(
        self,
        compiled: Function,
        eager: Function,
        name: str,
        counts: CompileCounts,
        patches: dict[str, Any],
    ) -> None:
        self._compiled = compiled
        self._eager = eager
        self.name = name
        self._counts = counts
        self._patches = patches
        self._ways: set[Any] = set()  # of calling it, that have a graph
        self._failed: dict[Any, str] = {}  # ways that have none, with the reason
        self._too_many: dict[Any, str] = {}  # the same for shapes beyond the limit

    def __call__(self, *args: Any) -> Any:
        if self._failed or self._too_many:
            reason = self._failed.get(way(args)) or self._too_many.get((way(args), shapes(args)))
            if reason is not None:
                return self._run_instead(reason, args)
        graphs = self._counts.graphs
        try:
            with self._patched():
                result = self._compiled(*args)
        except Exception as error:
            reason = why_not_compiled(error)
            if reason is None:
                raise
            if is_limit(error):
                self._too_many[way(args), shapes(args)] = reason
            else:
                self._failed[way(args)] = reason
        else:
            if self._counts.graphs != graphs:
                self._counts.recompilations += way(args) in self._ways
                self._ways.add(way(args))
            return result
        # Outside of the handler: its traceback would keep the tensors of the trace.
        if reason not in self._counts.eager_calls:
            _logger.warning("%s runs %s, which is slower: %s", self.name, self._instead, reason)
        return self._run_instead(reason, args)

    @property
    def _instead(self) -> str:
        other = self._eager
        return f"as {other.name}" if isinstance(other, _CompiledFunction) else "eagerly"

    def _run_instead(self, reason: str, args: tuple[Any, ...]) -> Any:
        if not isinstance(self._eager, _CompiledFunction):  # which counts its own
            self._counts.eager_calls[reason] = self._counts.eager_calls.get(reason, 0) + 1
        return self._eager(*args)

    def _patched(self) -> contextlib.AbstractContextManager[Any]:
        if not self._patches:
            return contextlib.nullcontext()
        patched: contextlib.AbstractContextManager[Any] = torch._dynamo.config.patch(  # noqa: SLF001 - the module has no public name
            **self._patches
        )
        return patched


def own_code(function: Function, name: str) -> Function:
    """A copy of ``function`` with a code object of its own."""
    if isinstance(function, functools.partial):
        # Given one, torch.compile would wrap it in a function of its own, one code for all.
        def call(*args: Any) -> Any:
            return function(*args)

        return own_code(call, name)
    assert isinstance(function, types.FunctionType)
    assert function.__kwdefaults__ is None
    code = function.__code__.replace(co_name=name)
    return types.FunctionType(
        code, function.__globals__, name, function.__defaults__, function.__closure__
    )


def way(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """What of a call needs a graph of its own, shapes apart: gradients, names, switches."""
    kinds = [
        tuple(sorted(arg)) if isinstance(arg, dict) else arg if isinstance(arg, bool) else None
        for arg in args
    ]
    return (torch.is_grad_enabled(), *kinds)


def shapes(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The shapes of the tensors that are arguments themselves."""
    return tuple(tuple(arg.shape) for arg in args if isinstance(arg, torch.Tensor))


def is_limit(error: Exception) -> bool:
    """``error`` says that a function has as many graphs as it may have."""
    from torch._dynamo.exc import FailOnRecompileLimitHit  # noqa: PLC0415 - loaded by now

    return isinstance(error, FailOnRecompileLimitHit)


def why_not_compiled(error: Exception) -> str | None:
    """The reason in a line if ``error`` says that something cannot be compiled, else None.

    Raises:
        torch.OutOfMemoryError: memory ran out meanwhile, which another step may not.
    """
    from torch._dynamo.exc import TorchDynamoException  # noqa: PLC0415 - loaded by now

    if is_limit(error):
        limit = torch._dynamo.config.recompile_limit  # noqa: SLF001 - no public name
        return (
            f"it has {limit} graphs for as many shapes, the most that torch compiles of one "
            "function; packing: true, or a larger pad_to_multiple_of, gives fewer"
        )
    if not isinstance(error, TorchDynamoException):
        return None
    inner = getattr(error, "inner_exception", None) or error
    if isinstance(inner, torch.OutOfMemoryError):
        raise inner from None
    text = str(inner).strip()
    return f"{type(inner).__name__}: {text.splitlines()[0] if text else 'no message'}"


def _tuned(tune: bool) -> contextlib.AbstractContextManager[Any]:
    if not tune or torch.are_deterministic_algorithms_enabled():
        return contextlib.nullcontext()
    from torch._inductor import config  # noqa: PLC0415 - loaded by now

    patched: contextlib.AbstractContextManager[Any] = config.patch(max_autotune_pointwise=True)
    return patched


@contextlib.contextmanager
def _backward_at_once() -> Iterator[None]:
    """A backward that cannot be compiled is known now, not when its forward has run.

    A kept graph has given its weights away by then, and nothing could run in its place.
    """
    from torch._functorch import config  # noqa: PLC0415 - loaded by now

    if not hasattr(config, "force_non_lazy_backward_lowering"):
        yield
        return
    with config.patch(force_non_lazy_backward_lowering=True):
        yield
