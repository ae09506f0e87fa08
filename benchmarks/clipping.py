"""The error of optimistic clipping's correction, by coefficient and step.

Run: python benchmarks/clipping.py [--elements 1M] [--json]

A chunk is updated as if nothing were clipped and corrected to the coefficient c; the plain order
scales by c first. Printed is the difference of the bias-corrected step u (a weight moves by
learning rate x u, and |u| is about 1), the largest and the 99.9th percentile over all elements.
Gradients are normal, each element with a scale of its own over six decades; on the last step every
element is up to 16 times its running RMS, the most that the gate lets through.
"""

from __future__ import annotations

import argparse
import json

import numpy as np

from headrace import kernels
from headrace.units import parse_count

BETA1, BETA2, EPS, RATE = 0.9, 0.999, 1e-8, 1e-3
STEPS = (10, 100, 1000)
COEFFICIENTS = (0.99, 0.5, 0.1, 0.01, 0.0)


def step_taken(exp_avg: np.ndarray, exp_avg_sq: np.ndarray, step: int) -> np.ndarray:
    """U in float64, from the moments after the step."""
    first = exp_avg.astype(np.float64) / (1 - BETA1**step)
    second = exp_avg_sq.astype(np.float64) / (1 - BETA2**step)
    return first / (np.sqrt(second) + EPS)


def errors(step: int, num_elements: int) -> dict[float, tuple[float, float]]:
    """Largest and 99.9th percentile error of u for every coefficient."""
    host = kernels.load()
    pool = host.Pool(kernels.num_usable_cores())
    rng = np.random.default_rng(step)
    scale = (10.0 ** rng.uniform(-6, 0, num_elements)).astype(np.float32)
    state = [np.zeros(num_elements, np.float32) for _ in range(3)]
    settings = {"learning_rate": RATE, "beta1": BETA1, "beta2": BETA2, "eps": EPS,
                "weight_decay": 0.0, "pool": pool}  # fmt: skip
    for t in range(1, step):
        grad = rng.standard_normal(num_elements, np.float32) * scale
        assert host.adamw_float32(*state, grad, step=t, **settings)
    grad = rng.standard_normal(num_elements, np.float32) * scale
    grad *= rng.uniform(0, 16, num_elements).astype(np.float32)
    result = {}
    for c in COEFFICIENTS:
        plain = [plane.copy() for plane in state]
        early = [plane.copy() for plane in state]
        assert host.adamw_float32(*plain, grad, step=step, grad_scale=c, **settings)
        assert host.adamw_float32(*early, grad, step=step, **settings)
        assert host.correct_float32(*early, grad, step=step, applied_scale=1.0, scale=c, **settings)
        difference = np.abs(step_taken(*early[1:], step) - step_taken(*plain[1:], step))
        result[c] = (float(difference.max()), float(np.quantile(difference, 0.999)))
    pool.close()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", default="1M")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    table = {step: errors(step, parse_count(arguments.elements)) for step in STEPS}
    if arguments.json:
        print(json.dumps(table))
        return
    print(f"{'step':>6}" + "".join(f"{f'c = {c}':>22}" for c in COEFFICIENTS))
    for step, row in table.items():
        cells = "".join(f"{f'{row[c][0]:.1e} / {row[c][1]:.1e}':>22}" for c in COEFFICIENTS)
        print(f"{step:>6}{cells}")


if __name__ == "__main__":
    main()
