"""What a step and an evaluation return."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one step did.

    Attributes:
        loss: mean cross-entropy over the global batch's supervised tokens (nats a token).
        num_supervised_tokens: positions with a target.
        num_tokens: positions, padding included.
        grad_norm: 2-norm of the gradient before clipping.
        skipped: the gradient was not finite and the state is as before.
        exposed_seconds: time compute waited, by lane.
        auxiliary_loss: the balancing loss of routers before its coefficient; None without one.
        busiest_expert: by layer with experts, rows of the busiest one over the even share.
        num_idle_experts: by layer with experts, those without a row.
    """

    loss: float
    num_supervised_tokens: int
    num_tokens: int
    grad_norm: float
    skipped: bool
    exposed_seconds: dict[str, float] = field(default_factory=dict)
    auxiliary_loss: float | None = None
    busiest_expert: dict[int, float] = field(default_factory=dict)
    num_idle_experts: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class EvalResult:
    """Summed cross-entropy (nats) and the number of supervised tokens behind it."""

    loss_sum: float
    num_supervised_tokens: int
