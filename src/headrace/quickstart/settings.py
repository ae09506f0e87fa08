"""What a quickstart run is made of: sizes, dates, seeds; and the configurations built of them.

Defaults keep the whole run within 8 minutes and 4 GiB on two cores. Nothing here runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import date
from typing import TYPE_CHECKING

from headrace.quickstart.panel import PanelConfig

if TYPE_CHECKING:
    from pathlib import Path

CUT, ALL = "cutoff", "all-dates"
"""Names of the two trained models."""

EOS_TOKEN = "<|endoftext|>"  # noqa: S105 (a token of text)


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A Qwen3-class model trained from scratch; 4.2M parameters by default.

    Attributes:
        vocab_size: tokens of the tokenizer trained on the text before the cutoff.
        hidden_size: width.
        num_layers: decoder layers.
        num_heads: attention heads.
        num_kv_heads: key and value heads.
        mlp_size: width of the MLP.
    """

    vocab_size: int = 4096
    hidden_size: int = 256
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    mlp_size: int = 768


@dataclass(frozen=True, kw_only=True)
class QuickstartConfig:
    """One quickstart run.

    Attributes:
        output_dir: work directory; a second run in it goes on where the first ended.
        model: Hugging Face folder to continue from instead of training from scratch.
        gguf_file: name of a GGUF file in ``model`` that holds the weights.
        seed: of everything random.
        steps: optimizer steps of each training run; by default 150, or 10 with ``model``.
        cutoff: last day the first model may know of.
        shape: of the model trained from scratch.
        panel: which part of the prices is audited.
        num_twins: untrained networks of the same shape.
        max_length: tokens of a training row.
        rows_per_step: training rows of a step.
        num_shifts: shifted dates of the audit.
    """

    output_dir: Path
    model: Path | None = None
    gguf_file: str | None = None
    seed: int = 0
    steps: int | None = None
    cutoff: date = date(2006, 12, 31)
    shape: ModelShape = field(default_factory=ModelShape)
    panel: PanelConfig = field(default_factory=PanelConfig)
    num_twins: int = 5
    max_length: int = 256
    rows_per_step: int = 8
    num_shifts: int = 199

    @property
    def num_steps(self) -> int:
        """Optimizer steps of each run."""
        if self.steps is not None:
            return self.steps
        return 150 if self.model is None else 10

    @property
    def names(self) -> tuple[str, str]:
        """The two models: trained up to the cutoff, and on everything."""
        return f"{CUT}-{self.cutoff.year}", ALL
