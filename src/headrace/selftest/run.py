"""The self-test of a configuration, from cache or run: does this model train exactly here?

Owns the order of the checks and what a failure means. The invariant: ``ok`` is said only after
every check passed on a tiny model of the same class and switches, under the versions in use.
Trains nothing and reads no weights.
"""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from headrace.errors import CapacityError, HeadraceError, ModelRefusedError
from headrace.models.building import first_line
from headrace.models.spec import ModelSpec
from headrace.selftest import checks
from headrace.selftest.adapters import check_adapters, tiny_settings
from headrace.selftest.reference import reference_model
from headrace.selftest.twin import filled_state, tiny_config
from headrace.selftest.verdict import (
    Verdict,
    cache_key,
    current_versions,
    read_cached,
    write_cached,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

# Keys of a configuration that say nothing of what is computed.
_NO_SWITCH = frozenset(
    {
        "_name_or_path", "architectures", "auto_map", "bos_token_id", "eos_token_id", "id2label",
        "label2id", "problem_type", "transformers_version", "use_cache",
    }
)  # fmt: skip
_logger = logging.getLogger(__name__)


def run_selftest(config: Any, *, use_cache: bool = True, compiled: bool = False) -> Verdict:
    """Test a configuration's class and switches on a tiny twin.

    Args:
        config: a transformers configuration.
        use_cache: believe an earlier verdict under the same versions.
        compiled: trace the layers as a compiler would, too: what a GPU runs.
    """
    started = time.perf_counter()
    versions = current_versions()
    model_type = str(getattr(config, "model_type", ""))
    try:
        spec = ModelSpec.from_config(config)
    except HeadraceError as error:
        return Verdict(
            verdict="refused",
            reason=error.message,
            model_type=model_type,
            seconds=time.perf_counter() - started,
            versions=versions,
        )
    return selftest_of(spec, use_cache=use_cache, compiled=compiled)


def selftest_of(spec: ModelSpec, *, use_cache: bool = True, compiled: bool = False) -> Verdict:
    """The same for a model that was taken apart already."""
    started = time.perf_counter()
    versions = current_versions()
    architecture = type(spec.model).__name__
    tiny = tiny_config(spec)
    lora = None if spec.adapters is None else tiny_settings(spec.adapters)
    model = {k: v for k, v in tiny.to_dict().items() if k not in _NO_SWITCH}
    switches = {
        "model": model,
        "lora": None if lora is None else asdict(lora),
        "compiled": compiled,
    }
    key = cache_key(architecture, switches, versions)
    if use_cache and (found := read_cached(key)) is not None:
        return found
    verdict = Verdict(
        verdict="ok",
        model_type=str(getattr(spec.config, "model_type", "")),
        architecture=architecture,
        versions=versions,
    )
    try:
        with _quiet():
            verdict = _run_checks(verdict, tiny, compiled=compiled)
            if lora is not None:
                verdict = _worse(verdict, check_adapters(tiny, lora, compiled=compiled))
    except CapacityError:
        raise  # says nothing of the model, and must not be remembered as if it did
    except HeadraceError as error:
        verdict = replace(verdict, verdict="refused", reason=error.message)
    except Exception as error:
        # Whatever a model's own code raises on a tiny twin, it cannot be proven.
        _logger.debug("self-test of %s", architecture, exc_info=True)
        reason = f"the tiny twin raised {type(error).__name__}: {first_line(error)}"
        verdict = replace(verdict, verdict="refused", reason=reason)
    verdict = replace(verdict, seconds=time.perf_counter() - started)
    write_cached(key, verdict)
    return verdict


def require_proof(spec: ModelSpec, *, compiled: bool = False) -> Verdict:
    """The self-test of a model, run or remembered for its class, switches and versions.

    Args:
        spec: the model.
        compiled: as of :func:`run_selftest`.

    Raises:
        ModelRefusedError: the model would not train exactly.
    """
    verdict = selftest_of(spec, compiled=compiled)
    if verdict.verdict != "ok":
        raise ModelRefusedError(
            f"{verdict.architecture} cannot be trained exactly: {verdict.reason}",
            remedy="headrace doctor --model shows the whole verdict",
        )
    return verdict


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' progress bars and remarks on tiny configurations."""
    from transformers.utils import logging as hf_logging  # noqa: PLC0415 - slow

    level, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(level)
        if bars:
            hf_logging.enable_progress_bar()


def _worse(verdict: Verdict, found: checks.GradientCheck) -> Verdict:
    """The verdict with the larger of two gradient errors."""
    if verdict.gradient_error is not None and verdict.gradient_error >= found.error:
        return verdict
    return replace(verdict, gradient_error=found.error, worst_parameter=found.parameter)


def _run_checks(verdict: Verdict, tiny: Any, *, compiled: bool) -> Verdict:
    spec = ModelSpec.from_config(tiny)
    state = filled_state(spec)
    try:
        model = reference_model(spec, state)
        verdict = replace(verdict, num_layers=spec.num_layers)
        found = checks.check_gradients(spec, state, model, compiled=compiled)
        verdict = _worse(verdict, found)
        verdict = replace(verdict, packing_leak=checks.packing_leak(spec, state))
        if spec.auxiliary_loss is not None:
            verdict = _worse(verdict, checks.check_auxiliary_loss(tiny, found))
        return replace(verdict, reload_error=checks.reload_error(spec, state, model))
    finally:
        state.close()
