"""Many ridges that differ in how often each entity was drawn, solved together.

Owns the refits of protocol ``vessl-2026``'s bootstrap on wide embeddings. A refit weighs whole
entities, so all of them share one matrix of rows: conjugate gradients solve thousands of systems
with two matrix products an iteration where each refit alone would need a Gram matrix of its
own. Coordinates are whitened by the unweighted Gram matrix first, in which every weighted one
is near the identity. The invariant: a solution that is returned as converged has a residual in
double precision of at most 4e-12 of its right-hand side; single precision only ever proposes
corrections. It scores nothing.

Shape legend: n rows, E entities, P columns, S systems.

Source: iterative refinement with an inner Krylov solver of lower precision, Carson and Higham
2018.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy import linalg

from headrace.audit.threads import spread

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float64]
    Single = NDArray[np.float32]

_TOLERANCE = 4e-12
_INNER_TOLERANCE = 2e-6  # what single precision reaches in whitened coordinates
_MAX_INNER, _MAX_OUTER = 40, 5
_ROWS_AT_ONCE = 2048
_SYSTEMS_AT_ONCE = 128  # that iterate together; others iterate beside them


@dataclass(frozen=True)
class WeightedFits:
    """Solutions.

    Attributes:
        coefficients_PS, intercept_S: of each system.
        converged_S: whether its residual met the tolerance.
    """

    coefficients_PS: Array
    intercept_S: Array
    converged_S: NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class _Operator:
    """``V -> (X' W X - count mean mean' + ridge) V`` for every system's own weights ``W``."""

    values: NDArray[np.floating]
    entity: NDArray[np.int64]
    weight_ES: NDArray[np.floating]
    count_S: NDArray[np.floating]
    mean_PS: NDArray[np.floating]
    ridge: float | NDArray[np.floating]

    def apply(self, v_PS: NDArray[np.floating], chosen: NDArray[np.intp]) -> NDArray[np.floating]:
        weight_ES = self.weight_ES[:, chosen]
        mean_PS = self.mean_PS[:, chosen]
        out = np.zeros_like(v_PS)
        for start in range(0, len(self.values), _ROWS_AT_ONCE):
            rows = self.values[start : start + _ROWS_AT_ONCE]
            product_nS = rows @ v_PS
            product_nS *= weight_ES[self.entity[start : start + _ROWS_AT_ONCE]]
            out += rows.T @ product_nS
        along_S = np.einsum("ps,ps->s", mean_PS, v_PS) * self.count_S[chosen]
        out -= mean_PS * along_S
        out += self.ridge * v_PS if isinstance(self.ridge, float) else self.ridge @ v_PS
        return out


def solve_weighted(
    values: Array, target: Array, entity: NDArray[np.int64], weight_ES: Array, *, alpha: float
) -> WeightedFits:
    """Ridge with an intercept of ``target`` on ``values`` for every column of weights.

    Args:
        values: ``(n, P)``, centred near 0.
        target: ``(n,)``.
        entity: ``(n,)`` row of ``weight_ES`` that weighs a row of ``values``.
        weight_ES: how often each entity counts in each system.
        alpha: penalty on the summed squared error.
    """
    num_systems = weight_ES.shape[1]
    mean_PS = np.zeros((values.shape[1], num_systems))
    right_PS = np.zeros_like(mean_PS)
    count_S, total_S = np.zeros((2, num_systems))

    def add_up(systems: slice) -> None:
        for start in range(0, len(values), _ROWS_AT_ONCE):
            rows, y = (x[start : start + _ROWS_AT_ONCE] for x in (values, target))
            weight_nS = weight_ES[entity[start : start + _ROWS_AT_ONCE], systems]
            mean_PS[:, systems] += rows.T @ weight_nS
            right_PS[:, systems] += (rows * y[:, None]).T @ weight_nS
            count_S[systems] += weight_nS.sum(axis=0)
            total_S[systems] += y @ weight_nS

    for _ in spread(add_up, _together(num_systems), dimension=values.shape[1]):
        pass
    mean_PS /= count_S
    target_mean_S = total_S / count_S
    right_PS -= mean_PS * total_S
    gram = values.T @ values
    gram[np.diag_indices_from(gram)] += alpha
    factor = linalg.cholesky(gram, lower=True, overwrite_a=True, check_finite=False)
    exact = _Operator(
        values=values, entity=entity, weight_ES=weight_ES, count_S=count_S, mean_PS=mean_PS,
        ridge=alpha,
    )  # fmt: skip
    quick = _whitened(exact, factor, alpha)
    solution_PS = np.zeros_like(right_PS)
    size_S = np.linalg.norm(_whiten(factor, right_PS), axis=0)
    size_S[size_S == 0] = 1.0
    error_S = np.full(num_systems, np.inf)

    def refine(systems: slice) -> None:
        chosen = np.arange(systems.start, systems.stop)
        for outer in range(_MAX_OUTER + 1):
            left_PS = right_PS[:, chosen]
            if outer:
                left_PS = left_PS - exact.apply(solution_PS[:, chosen], chosen)
            left_PS = _whiten(factor, left_PS)
            error_S[chosen] = np.linalg.norm(left_PS, axis=0) / size_S[chosen]
            open_S = error_S[chosen] > _TOLERANCE
            chosen, left_PS = chosen[open_S], left_PS[:, open_S]
            if not len(chosen) or outer == _MAX_OUTER:
                break
            step_PS = _conjugate_gradients(quick, left_PS, chosen)
            solution_PS[:, chosen] += linalg.solve_triangular(
                factor, step_PS, lower=True, trans="T", check_finite=False
            )

    for _ in spread(refine, _together(num_systems), dimension=values.shape[1]):
        pass
    intercept_S = target_mean_S - np.einsum("ps,ps->s", mean_PS, solution_PS)
    return WeightedFits(solution_PS, intercept_S, error_S <= _TOLERANCE)


def _together(num_systems: int) -> list[slice]:
    """Systems that are solved by one thread; the cut never depends on the number of cores."""
    starts = range(0, num_systems, _SYSTEMS_AT_ONCE)
    return [slice(start, min(start + _SYSTEMS_AT_ONCE, num_systems)) for start in starts]


def _whiten(factor: Array, values_PS: NDArray[np.floating]) -> Array:
    white: Array = linalg.solve_triangular(factor, values_PS, lower=True, check_finite=False)
    return white


def _whitened(exact: _Operator, factor: Array, alpha: float) -> _Operator:
    """The operator in the coordinates of ``factor``, in single precision."""
    white = np.empty(exact.values.shape, dtype=np.float32)

    def turn(start: int) -> None:
        rows = slice(start, start + _ROWS_AT_ONCE)
        white[rows] = _whiten(factor, exact.values[rows].T).T

    starts = range(0, len(white), _ROWS_AT_ONCE)
    for _ in spread(turn, starts, dimension=len(factor)):
        pass
    inverse = _whiten(factor, np.eye(len(factor)))
    return _Operator(
        values=white,
        entity=exact.entity,
        weight_ES=exact.weight_ES.astype(np.float32),
        count_S=exact.count_S.astype(np.float32),
        mean_PS=_whiten(factor, exact.mean_PS).astype(np.float32),
        ridge=(alpha * (inverse @ inverse.T)).astype(np.float32),
    )


def _conjugate_gradients(quick: _Operator, right_PS: Array, chosen: NDArray[np.intp]) -> Array:
    """Corrections for ``chosen`` systems; a system stops moving when it is solved."""
    size_S = np.linalg.norm(right_PS, axis=0)
    # Scaled to length 1, so that single precision serves large and small residuals alike.
    residual_PS = (right_PS / size_S).astype(np.float32)
    solution_PS = np.zeros_like(residual_PS)
    direction_PS = residual_PS.copy()
    square_S = np.einsum("ps,ps->s", residual_PS, residual_PS)
    active = np.arange(len(chosen))
    for _ in range(_MAX_INNER):
        image_PS = quick.apply(direction_PS, chosen[active])
        curvature_S = np.einsum("ps,ps->s", direction_PS, image_PS)
        step_S = square_S / np.maximum(curvature_S, np.finfo(np.float32).tiny)
        solution_PS[:, active] += direction_PS * step_S
        residual_PS -= image_PS * step_S
        fresh_S = np.einsum("ps,ps->s", residual_PS, residual_PS)
        direction_PS *= fresh_S / square_S
        direction_PS += residual_PS
        square_S = fresh_S
        moving = square_S > _INNER_TOLERANCE**2
        if not moving.all():
            active = active[moving]
            residual_PS, direction_PS = residual_PS[:, moving], direction_PS[:, moving]
            square_S = square_S[moving]
        if not len(active):
            break
    corrections: Array = solution_PS * size_S
    return corrections


def solve_draws(
    values: Array,
    target: Array,
    entity: NDArray[np.int64],
    *,
    train: NDArray[np.bool_],
    times_BE: Array,
    fold_BE: NDArray[np.intp],
    num_folds: int,
    alpha: float,
) -> Array:
    """``(B, 2)`` R2 off and on of bootstrap draws; NaN where a system did not converge.

    Args:
        values: ``(n, P)``.
        target: ``(n,)``.
        entity: ``(n,)`` positions.
        train: ``(n,)`` rows up to the split date.
        times_BE: how often each draw holds each entity.
        fold_BE: fold of each entity in each draw, -1 where it was not drawn.
        num_folds: of the leakage-on arm.
        alpha: penalty.
    """
    weight_EB = times_BE.T
    fits = solve_weighted(values[train], target[train], entity[train], weight_EB, alpha=alpha)
    off = _scores(values[~train], target[~train], entity[~train], fits, weight_EB)
    # System (draw, fold): draws vary slowest.
    tested_EBK = fold_BE.T[:, :, None] == np.arange(num_folds)
    tested_ES = (weight_EB[:, :, None] * tested_EBK).reshape(len(weight_EB), -1)
    trained_ES = np.repeat(weight_EB, num_folds, axis=1) - tested_ES
    fits = solve_weighted(values, target, entity, trained_ES, alpha=alpha)
    on = _scores(values, target, entity, fits, tested_ES).reshape(-1, num_folds).mean(axis=1)
    return np.column_stack([off, on])


def _scores(
    values: Array, target: Array, entity: NDArray[np.int64], fits: WeightedFits, weight_ES: Array
) -> Array:
    """``(S,)`` R2 on weighted rows, as scikit-learn's ``r2_score``; NaN where not converged."""
    count_S, total_S, residual_S, spread_S = np.zeros((4, weight_ES.shape[1]))
    blocks = [slice(start, start + _ROWS_AT_ONCE) for start in range(0, len(values), _ROWS_AT_ONCE)]
    for rows in blocks:
        weight_nS = weight_ES[entity[rows]]
        count_S += weight_nS.sum(axis=0)
        total_S += target[rows] @ weight_nS
    mean_S = total_S / count_S
    for rows in blocks:
        weight_nS = weight_ES[entity[rows]]
        error_nS = values[rows] @ fits.coefficients_PS
        error_nS += fits.intercept_S - target[rows, None]
        residual_S += np.einsum("ns,ns,ns->s", weight_nS, error_nS, error_nS)
        centred_nS = target[rows, None] - mean_S
        spread_S += np.einsum("ns,ns,ns->s", weight_nS, centred_nS, centred_nS)
    # As r2_score: a constant target scores 1 if met exactly, else 0.
    flat_S = spread_S <= 0
    scores = 1.0 - residual_S / np.where(flat_S, 1.0, spread_S)
    scores = np.where(flat_S, (residual_S == 0) * 1.0, scores)
    found: Array = np.where(fits.converged_S, scores, np.nan)
    return found
