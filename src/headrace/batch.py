"""The unit of input: one micro-batch of tokens.

Shape legend: B rows, T positions a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

IGNORE_INDEX = -100


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Tokens that pass through a layer together.

    Attributes:
        input_ids_BT: int64 token ids.
        targets_BT: int64; ``targets[b, t]`` is the token that position ``t`` must predict,
            ``-100`` where nothing is supervised (padding, prompts, the end of a document).
            Already shifted: the engine shifts nothing.
        position_ids_BT: int64, starting again at 0 for every document.
        cu_seqlens: int32 ``(num_documents + 1,)``, document boundaries in the flattened
            ``B * T`` tokens, first 0 and last ``B * T``; a run of padding counts as a document.
            ``None`` when every row is one document (padding, if any, on the right).
    """

    input_ids_BT: torch.Tensor
    targets_BT: torch.Tensor
    position_ids_BT: torch.Tensor
    cu_seqlens: torch.Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """Positions, padding included."""
        return self.input_ids_BT.numel()

    def split(self, rows: int) -> list[MicroBatch]:
        """The same tokens in micro-batches of at most ``rows`` rows; documents stay whole."""
        total, length = self.input_ids_BT.shape
        parts = []
        for start in range(0, total, rows):
            stop = min(start + rows, total)
            boundaries = self.cu_seqlens
            if boundaries is not None:
                first, last = start * length, stop * length
                inside = boundaries[(boundaries >= first) & (boundaries <= last)]
                if inside[0] != first or inside[-1] != last:
                    return [self]  # a document goes over the end of a row
                boundaries = inside - first
            parts.append(
                MicroBatch(
                    input_ids_BT=self.input_ids_BT[start:stop],
                    targets_BT=self.targets_BT[start:stop],
                    position_ids_BT=self.position_ids_BT[start:stop],
                    cu_seqlens=boundaries,
                )
            )
        return parts

    @property
    def num_supervised_tokens(self) -> int:
        """Positions with a target."""
        return int((self.targets_BT != IGNORE_INDEX).sum())
