"""What a quickstart run is made of: sizes, dates, seeds; and the configurations built of them.

Defaults keep the whole run within 8 minutes and 4 GiB on two cores. Nothing here runs.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from datetime import date
from typing import TYPE_CHECKING, Any

from headrace.quickstart.panel import PanelConfig
from headrace.quickstart.sources import TEXT_DISTRIBUTION, TEXT_LICENCE

if TYPE_CHECKING:
    from pathlib import Path


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

    def hugging_face(self, max_length: int) -> dict[str, Any]:
        """As the contents of a ``config.json``."""
        return {
            "model_type": "qwen3",
            "architectures": ["Qwen3ForCausalLM"],
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.hidden_size // self.num_heads,
            "intermediate_size": self.mlp_size,
            "max_position_embeddings": max_length,
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": 0,
        }


LIGHT_PANEL, LIGHT_TWINS = PanelConfig(stride=7, num_entities=10), 4
"""What a larger, given model reads: still above the verdict's minimum, a third of the prompts."""


@dataclass(frozen=True, kw_only=True)
class QuickstartConfig:
    """One quickstart run.

    Attributes:
        output_dir: work directory; a second run in it goes on where the first ended.
        model: Hugging Face folder, or folder with one GGUF file, to continue from instead of
            training from scratch.
        model_cutoff: knowledge cutoff of ``model``, where it is known.
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
    model_cutoff: date | None = None
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
    def cut_name(self) -> str:
        """The model trained on text up to the cutoff."""
        return f"{'cutoff' if self.model is None else 'continued'}-{self.cutoff.year}"

    @property
    def other_name(self) -> str:
        """The model it is compared with: trained on everything, or the one given."""
        return "all-dates" if self.model is None else "base"

    @property
    def trained_names(self) -> tuple[str, ...]:
        """Models that are trained here, each on the vintage of its name."""
        return (self.cut_name, self.other_name) if self.model is None else (self.cut_name,)

    @property
    def corpus_dir(self) -> Path:
        """The corpus: a folder of two vintages, or the only one."""
        corpus = self.output_dir / "corpus"
        return corpus if self.model is None else corpus / self.cut_name

    def corpus(self, last_day: date, tokenizer: Path | None) -> dict[str, Any]:
        """Contents of the corpus's YAML file.

        Args:
            last_day: of the last document, which is the cutoff of the second vintage.
            tokenizer: folder of the given model's, ``None`` to train one.
        """
        first, last = self.cutoff.isoformat(), last_day.isoformat()
        both = {"cutoffs": {self.cut_name: first, self.other_name: last}}
        trained = {"train": "bpe", "vocab_size": self.shape.vocab_size}
        return {
            "output_dir": str(self.corpus_dir),
            **(both if self.model is None else {"cutoff": first}),
            "cutoff_timezone": "America/New_York",  # the addresses' own: a day ends there
            "not_before": "1789-01-01",
            "sources": [
                {
                    "type": "jsonl",
                    "name": TEXT_DISTRIBUTION,
                    "path": str(self.output_dir / "documents.jsonl"),
                    "license": TEXT_LICENCE,
                    "available_at": {
                        "fields": ["published_at"],
                        "timezone": "America/New_York",
                    },
                    "metadata_fields": ["title", "url"],
                }
            ],
            "tokenizer": trained if tokenizer is None else {"path": str(tokenizer)},
        }

    def training(self, name: str, base: Path | None) -> dict[str, Any]:
        """Contents of the training YAML file of one model.

        Args:
            name: one of :attr:`trained_names`.
            base: folder of the model to continue from, ``None`` to start from random weights.
        """
        vintage = self.output_dir / "corpus" / name
        common = {
            "tokenizer_name_or_path": str(vintage / "tokenizer"),
            "datasets": [{"path": str(vintage / "tokens"), "type": "tokens", "name": name}],
            "data_cache_dir": str(self.output_dir / "cache" / "tokens"),
            "output_dir": str(self.output_dir / "runs" / name),
            "seed": self.seed,
            "max_steps": self.num_steps,
            "max_length": self.max_length,
            "per_device_train_batch_size": self.rows_per_step,
            "lr_scheduler_type": "cosine",
            "warmup_steps": max(1, self.num_steps // 15),
            "weight_decay": 0.1,
            "logging_steps": max(1, self.num_steps // 30),
            "save_steps": max(1, self.num_steps // 3),
            "save_total_limit": 1,
        }
        if base is not None:
            return common | {"model_name_or_path": str(base), "learning_rate": 1e-5}
        return common | {
            "model_config": self.shape.hugging_face(2 * self.max_length),
            "learning_rate": 3e-3,
        }

    def text_key(self) -> dict[str, Any]:
        """What shapes the corpus, as JSON types."""
        return {
            "cutoff": self.cutoff.isoformat(),
            "vocab_size": self.shape.vocab_size if self.model is None else None,
            "model": None if self.model is None else str(self.model.resolve()),
        }

    def training_key(self) -> dict[str, Any]:
        """What shapes a trained model, as JSON types."""
        return {
            "seed": self.seed,
            "steps": self.num_steps,
            "shape": asdict(self.shape),
            "max_length": self.max_length,
            "rows_per_step": self.rows_per_step,
        }

    def panel_key(self) -> dict[str, Any]:
        """What shapes the panel, as JSON types."""
        panel = asdict(self.panel)
        return panel | {"first": str(self.panel.first), "last": str(self.panel.last)}
