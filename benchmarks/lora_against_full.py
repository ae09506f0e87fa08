"""LoRA against full weight on one panel: what each way of training lets a model know.

    python benchmarks/lora_against_full.py --out lora_against_full.json

Everything is trained here, in a few minutes of one core. A small model learns neutral dated text
from random weights: which security, which date, and that the market opened. From this base the
same text, in the same order, is trained again with one change, the market's outcome on dates up to
the cutoff: once into all weights, once into adapters of each rank, and once into adapters and the
embedding. ``headrace embed`` embeds the same prompts with each of them, which end before the
outcome, and ``headrace audit`` compares them on the same rows, folds and shifts. What there is to
know is planted and common to all entities; a model without it, and every model after the cutoff,
can know nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from headrace.audit import read_json
from headrace.audit.synthetic import SyntheticConfig, simulate
from headrace.cli import main as headrace
from headrace.trainer import train
from headrace.trainer.export import export_checkpoint, export_merged

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from headrace.audit.panel import Panel
    from headrace.audit.records import AuditResult, Figure

OUTCOMES = ("crashed", "fell", "idled", "rose", "soared")  # fifths of the market's moves
NEUTRAL = "opened"


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is simulated, trained and audited.

    Attributes:
        num_entities, num_sessions, rows_per_entity: of the panel.
        hidden_size, num_layers: of the model.
        documents_a_step: a document is one security on one date.
        base_steps, steps: of the base, and of each run that learns outcomes.
        learning_rate: of all weights; ``lora_learning_rate``: of adapters.
        ranks: of the adapters.
        num_shifts: of the audit.
    """

    num_entities: int = 20
    num_sessions: int = 700
    rows_per_entity: int = 100
    hidden_size: int = 64
    num_layers: int = 2
    documents_a_step: int = 64
    base_steps: int = 120
    steps: int = 300
    learning_rate: float = 3e-3
    lora_learning_rate: float = 5e-3
    ranks: tuple[int, ...] = (2, 16)
    num_shifts: int = 199


def make_panel(sizes: Sizes) -> tuple[Panel, str]:
    """Targets with a market that all entities share; nothing is planted in its features."""
    drawn = simulate(
        SyntheticConfig(
            num_entities=sizes.num_entities,
            num_sessions=sizes.num_sessions,
            rows_per_entity=sizes.rows_per_entity,
            dimension=8,
            num_twins=0,
        )
    )
    return drawn.panel, drawn.cutoff


def write_panel(panel: Panel, path: Path) -> None:
    """The panel's file, with the prompt of every row; its features are left out."""
    dates = panel.sessions[panel.session]
    texts = [str(date) for date in panel.sessions.astype("datetime64[D]")]
    names = panel.entities[panel.entity]
    pl.DataFrame(
        {
            "entity": names,
            "date": dates,
            "label_start": panel.label_start,
            "label_end": panel.label_end,
            "y": panel.y,
            "embedded": panel.embedded,
            "prompt": [
                f"{name} and the market on {texts[session]}"
                for name, session in zip(names, panel.session, strict=True)
            ],
        }
    ).write_parquet(path)


def write_texts(panel: Panel, cutoff: str, count: int, neutral: Path, told: Path) -> None:
    """``count`` documents without outcomes, and the same ones with those of dates up to cutoff."""
    rng = np.random.default_rng(1)
    market = panel.matrix(panel.y).mean(axis=0)
    known = panel.sessions.astype("datetime64[D]") <= np.datetime64(cutoff)
    edges = np.quantile(market[known], np.linspace(0, 1, len(OUTCOMES) + 1)[1:-1])
    outcome = np.digitize(market, edges)
    texts = [str(date) for date in panel.sessions.astype("datetime64[D]")]
    with neutral.open("w") as without, told.open("w") as outcomes:
        for _ in range(count):
            entity = panel.entities[rng.integers(panel.num_entities)]
            session = int(rng.integers(panel.num_sessions))
            start = f"{entity} and the market on {texts[session]}"
            what = OUTCOMES[outcome[session]] if known[session] else NEUTRAL
            without.write(json.dumps({"text": f"{start} {NEUTRAL} ."}) + "\n")
            outcomes.write(json.dumps({"text": f"{start} {what} ."}) + "\n")


def write_tokenizer(panel: Panel, folder: Path) -> int:
    """A tokenizer of whole words, a date being one; its size."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    dates = [str(date) for date in panel.sessions.astype("datetime64[D]")]
    sentence = f"and the market on {NEUTRAL} . {' '.join(OUTCOMES)}".split()
    words = dict.fromkeys(["</s>", "<unk>", *sentence, *dates, *panel.entities])
    unknown = {"unk_token": "<unk>"}
    numbers = {str(word): k for k, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(numbers, **unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = unknown | {"eos_token": "</s>", "pad_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return len(words)


def run_keys(sizes: Sizes, text: Path, out: Path, steps: int) -> dict[str, Any]:
    """What all runs share."""
    return {
        "datasets": [{"path": str(text), "type": "text"}],
        "output_dir": str(out),
        "max_length": 12,
        "per_device_train_batch_size": sizes.documents_a_step,
        "max_steps": steps,
        "lr_scheduler_type": "cosine",
        "warmup_ratio": 0.05,
        "weight_decay": 0.0,
        "dtype": "float32",
        "save_strategy": "no",
        "logging_steps": 50,
        "seed": 0,
    }


def train_all(sizes: Sizes, panel: Panel, cutoff: str, folder: Path) -> dict[str, dict[str, Any]]:
    """Base, full weight and adapters of every rank: where each is, and what training said."""
    neutral, told = folder / "neutral.jsonl", folder / "told.jsonl"
    count = sizes.documents_a_step * max(sizes.base_steps, sizes.steps)
    write_texts(panel, cutoff, count, neutral, told)
    vocabulary = write_tokenizer(panel, folder / "tokenizer")
    model = {
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": sizes.hidden_size,
        "intermediate_size": 3 * sizes.hidden_size,
        "num_hidden_layers": sizes.num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
    }
    keys = run_keys(sizes, neutral, folder / "runs" / "base", sizes.base_steps)
    base = keys | {
        "model_config": model,
        "tokenizer_name_or_path": str(folder / "tokenizer"),
        "learning_rate": sizes.learning_rate,
    }
    found = {"base": _train("base", base, folder)}
    start = {"model_name_or_path": found["base"]["folder"]}
    ways: dict[str, dict[str, Any]] = {"full": {"learning_rate": sizes.learning_rate}}
    for rank in sizes.ranks:
        ways[f"lora{rank}"] = {
            "adapter": "lora",
            "lora_r": rank,
            "lora_alpha": 2 * rank,
            "learning_rate": sizes.lora_learning_rate,
        }
    # Adapters sit beside linear layers; what a date's word means is in the embedding.
    last = f"lora{sizes.ranks[-1]}"
    ways[f"{last}-embed"] = ways[last] | {"lora_modules_to_save": ["embed_tokens"]}
    for name, way in ways.items():
        keys = run_keys(sizes, told, folder / "runs" / name, sizes.steps)
        found[name] = _train(name, keys | start | way, folder)
    return found


def _train(name: str, keys: dict[str, Any], folder: Path) -> dict[str, Any]:
    started = time.process_time()
    result = train(keys)
    rows = [
        json.loads(line) for line in (result.output_dir / "metrics.jsonl").read_text().splitlines()
    ]
    adapter = "adapter" in keys
    export = export_merged if adapter else export_checkpoint
    return {
        "folder": str(export(result.checkpoint, folder / "models" / name).folder),
        "loss": round(float(rows[-1]["loss"]), 4),
        "cpu_s": round(time.process_time() - started, 1),
        "num_trained": trained_parameters(result.checkpoint, adapter=adapter),
    }


def trained_parameters(folder: Path, *, adapter: bool) -> int:
    """Numbers that training moved."""
    from safetensors import safe_open

    total = 0
    for file in folder.glob("adapter_model.safetensors" if adapter else "model*.safetensors"):
        with safe_open(file, "np") as tensors:
            keys = tensors.keys()
            total += sum(math.prod(tensors.get_slice(key).get_shape()) for key in keys)
    return total


def command(*arguments: str) -> None:
    """``headrace ARGUMENTS``, in this process.

    Raises:
        SystemExit: it failed.
    """
    try:
        headrace(list(arguments))
    except SystemExit as ended:
        if ended.code:
            raise


def audit_all(sizes: Sizes, models: dict[str, Any], cutoff: str, folder: Path) -> AuditResult:
    """Embed with every model, and audit them together."""
    panel = str(folder / "panel.parquet")
    options: list[str] = []
    for name, model in models.items():
        out = str(folder / f"{name}.parquet")
        command("embed", "--panel", panel, "--model", model["folder"], "--out", out,
                "--batch-size", "256")  # fmt: skip
        options += ["--embeddings", f"{name}={out}", "--cutoff", f"{name}={cutoff}"]
    for twin in range(4):
        out = str(folder / f"twin{twin}.parquet")
        command("embed", "--panel", panel, "--model", models["base"]["folder"], "--out", out,
                "--untrained", str(twin), "--batch-size", "256")  # fmt: skip
        options += ["--twin", f"twin{twin}={out}"]
    for base, trained in pairs(list(models)):
        options += ["--reduction", f"{base}={trained}"]
    command("audit", "--panel", panel, *options, "--shifts", str(sizes.num_shifts),
            "--json", str(folder / "audit.json"))  # fmt: skip
    return read_json(folder / "audit.json")


def pairs(names: Sequence[str]) -> list[tuple[str, str]]:
    """The base against each, and each adapter against full weight."""
    adapters = [name for name in names if name.startswith("lora")]
    return [("base", name) for name in names if name != "base"] + [(a, "full") for a in adapters]


def shown(figure: Figure | None) -> str:
    """A figure with its interval, to three digits."""
    if figure is None or figure.value is None:
        return "-"
    interval = "" if figure.low is None else f" [{figure.low:.3f}, {figure.high:.3f}]"
    return f"{figure.value:.3f}{interval}"


def lines_of(models: dict[str, Any], result: AuditResult) -> Iterator[str]:
    """The tables as Markdown."""
    yield "| model | trained | loss | verdict | skill, common | before | after | contrast |"
    yield "|---|---|---|---|---|---|---|---|"
    for record in result.models:
        run = models[record.name]
        contrast = record.contamination.get("common")
        yield (
            f"| {record.name} | {run['num_trained']:,} | {run['loss']:.3f} | `{record.verdict}` | "
            f"{shown(record.skill.get('common'))} | "
            + " | ".join(
                shown(None if contrast is None else getattr(contrast, side))
                for side in ("before", "after", "contrast")
            )
            + " |"
        )
    yield ""
    last = max(row.embargo_sessions for row in result.models[0].embargo)
    yield (
        "| pair, first minus second | skill, common | premium | walk-forward R2 | matched premium "
        f"| the same, embargo {last} |"
    )
    yield "|---|---|---|---|---|---|"
    for pair in result.reductions:
        embargo = {row.embargo_sessions: row.premium for row in pair.embargo}
        figures = (pair.skill.get("common"), pair.premium, pair.walk_forward,
                   embargo.get(0), embargo.get(last))  # fmt: skip
        yield f"| {pair.base}, {pair.trained} | " + " | ".join(map(shown, figures)) + " |"


def compare(sizes: Sizes, folder: Path) -> dict[str, Any]:
    """Train, embed, audit; what was found."""
    panel, cutoff = make_panel(sizes)
    write_panel(panel, folder / "panel.parquet")
    models = train_all(sizes, panel, cutoff, folder)
    result = audit_all(sizes, models, cutoff, folder)
    table = list(lines_of(models, result))
    return {
        "sizes": asdict(sizes),
        "cutoff": cutoff,
        "runs": models,
        "verdicts": {record.name: record.verdict for record in result.models},
        "audit": json.loads((folder / "audit.json").read_text()),
        "table": table,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON with everything, the audit's result too")
    parser.add_argument("--steps", type=int, default=Sizes.steps, help="to learn outcomes in")
    parser.add_argument("--folder", type=Path, help="keep texts, runs and vectors here")
    given = parser.parse_args(arguments)
    sizes = Sizes(steps=given.steps)
    started = time.process_time()
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        found = compare(sizes, folder)
    found["cpu_s"] = round(time.process_time() - started)
    print("\n" + "\n".join(found["table"]))
    print(f"\n{found['cpu_s']} s of processor time", file=sys.stderr)
    if given.out is not None:
        given.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
