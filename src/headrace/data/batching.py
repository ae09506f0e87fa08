"""How rows become steps: sizes alone, so that a configuration is checked without torch.

:mod:`headrace.data.loader` makes the batches. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class LoaderSettings:
    """How rows become steps.

    Attributes:
        micro_batch_size: rows a micro-batch (``per_device_train_batch_size``).
        accumulation: micro-batches a step and rank (``gradient_accumulation_steps``).
        num_ranks: processes that share a step.
        drop_last: leave out the rows at the end of an epoch that fill no whole step.
        pad_to_multiple_of: of the length of unpacked micro-batches.
        pad_token_id: what padding holds; never read by the loss.
    """

    micro_batch_size: int
    accumulation: int = 1
    num_ranks: int = 1
    drop_last: bool = False
    pad_to_multiple_of: int = 8
    pad_token_id: int = 0

    @property
    def rows_per_step(self) -> int:
        """Rows of the global batch."""
        return self.micro_batch_size * self.accumulation * self.num_ranks

    def steps_per_epoch(self, num_rows: int) -> int:
        """Optimizer steps of an epoch; the last may be short.

        Raises:
            ConfigError: when ``drop_last`` leaves none.
        """
        steps = num_rows // self.rows_per_step
        if self.drop_last:
            if steps == 0:
                raise ConfigError(
                    f"dataloader_drop_last leaves nothing: an epoch has {num_rows} rows, a step "
                    f"takes {self.rows_per_step}",
                    remedy="lower gradient_accumulation_steps or the batch size",
                )
            return steps
        return -(-num_rows // self.rows_per_step)
