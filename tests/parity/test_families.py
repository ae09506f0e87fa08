"""Every decoder family, proven: streamed gradients, packed documents, export and reload."""

import pytest

from families import FAMILIES, family_config
from headrace.models.spec import VERIFIED_FAMILIES, ModelSpec
from headrace.selftest import run_selftest
from headrace.selftest.checks import MAX_GRADIENT_ERROR, MAX_PACKING_LEAK


@pytest.mark.parametrize("family", FAMILIES)
def test_family(family, record_family):
    """A tiny twin of the released configuration, in float32, with poisoned slots."""
    verdict = run_selftest(family_config(family), use_cache=False)
    assert verdict.verdict == "ok", verdict.reason
    assert verdict.gradient_error <= MAX_GRADIENT_ERROR
    assert verdict.packing_leak <= MAX_PACKING_LEAK
    assert verdict.reload_error == 0
    record_family(family, verdict)


def test_verified_families_are_those_of_these_tests():
    proven = {ModelSpec(family_config(name)).config.model_type for name in FAMILIES}
    assert proven == set(VERIFIED_FAMILIES)
