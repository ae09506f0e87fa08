"""What a model says of given tokens: their log-probabilities, and whether they come first.

For evaluation harnesses. Logits exist for a chunk of tokens at a time, as in the loss.

Shape legend: B rows, T positions, C tokens of a chunk, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from headrace.batch import IGNORE_INDEX

if TYPE_CHECKING:
    from headrace.models.head import LogitRule


@dataclass(frozen=True, kw_only=True)
class TokenScores:
    """Of one micro-batch, on the CPU.

    Attributes:
        logprobs_BT: float32, of each position's target; 0 where nothing is supervised.
        greedy_BT: bool, whether the target is the likeliest token; true where nothing is.
    """

    logprobs_BT: torch.Tensor
    greedy_BT: torch.Tensor


class ScoreRecorder:
    """Stands where the loss of a chunk is computed, and keeps what it sees.

    Args:
        rule: what happens to logits after the head's matrix.
    """

    def __init__(self, rule: LogitRule) -> None:
        self._rule = rule
        self._logprobs: list[torch.Tensor] = []
        self._greedy: list[torch.Tensor] = []

    def __call__(
        self,
        logits_CV: torch.Tensor,
        targets_C: torch.Tensor,
        _factor: torch.Tensor,
        _with_grad: bool,
    ) -> tuple[torch.Tensor, None]:
        """The chunk's summed loss, as :data:`~headrace.models.loss.ChunkLoss`."""
        final_CV = self._rule(logits_CV.float())
        supervised_C = targets_C != IGNORE_INDEX
        picked_C = final_CV.gather(1, targets_C.clamp_min(0)[:, None])[:, 0]
        logprobs_C = torch.where(supervised_C, picked_C - final_CV.logsumexp(dim=1), 0.0)
        self._logprobs.append(logprobs_C)
        self._greedy.append((final_CV.argmax(dim=1) == targets_C) | ~supervised_C)
        return -logprobs_C.sum(dtype=torch.float64), None

    def result(self, shape: torch.Size) -> TokenScores:
        """Everything recorded, as rows of ``shape``."""
        return TokenScores(
            logprobs_BT=torch.cat(self._logprobs).view(shape).cpu(),
            greedy_BT=torch.cat(self._greedy).view(shape).cpu(),
        )
