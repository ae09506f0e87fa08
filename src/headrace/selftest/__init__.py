"""Proof, before the first step, that a model's streamed gradients are those of plain autograd."""

from headrace.selftest.run import run_selftest
from headrace.selftest.verdict import Verdict

__all__ = ["Verdict", "run_selftest"]
