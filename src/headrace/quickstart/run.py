"""``quickstart``: text → corpus → training → embeddings → audit → report, in one work directory.

Owns the order of the steps and nothing of what they do: each calls the part of headrace that a
user would call. The invariant: a finished step is never repeated, and a changed setting repeats
exactly the steps that depend on it.
"""

from __future__ import annotations

import dataclasses
import json
import resource
import time
from dataclasses import dataclass
from datetime import date
from functools import partial
from typing import TYPE_CHECKING, Any

from headrace.errors import HeadraceError
from headrace.quickstart import sources
from headrace.quickstart.base import open_base
from headrace.quickstart.embedding import Network, embed_networks
from headrace.quickstart.ledger import Ledger
from headrace.quickstart.panel import build_panel

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from headrace.audit import Panel
    from headrace.quickstart.settings import QuickstartConfig


@dataclass(frozen=True, kw_only=True)
class QuickstartResult:
    """What a run leaves.

    Attributes:
        report: the HTML file.
        report_json: the same for programs.
        headline: the finding in one line.
        verdicts: of each model, in the report's order.
        seconds: of this call.
        step_seconds: of each step, when it ran.
        peak_rss_bytes: largest resident memory of this process.
    """

    report: Path
    report_json: Path
    headline: str
    verdicts: dict[str, str]
    seconds: float
    step_seconds: dict[str, float]
    peak_rss_bytes: int

    def to_json(self) -> dict[str, Any]:
        """JSON types."""
        paths = {"report": str(self.report), "report_json": str(self.report_json)}
        return dataclasses.asdict(self) | paths


def quickstart(config: QuickstartConfig, console: Console) -> QuickstartResult:
    """Run everything that is not done yet in ``config.output_dir``.

    Args:
        config: sizes, dates, seeds.
        console: where progress is shown.

    Raises:
        HeadraceError: anything of :mod:`headrace.errors`; what is done is kept.
    """
    started = time.monotonic()
    closes = sources.read_closes()  # both sources are looked for before anything is made
    sources.distribution_file(sources.TEXT_DISTRIBUTION, sources.TEXT_TABLE)

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    with Ledger(config.output_dir, num_steps=8, say=say) as ledger:
        run = _Run(config, console, ledger, closes)
        run.text()
        run.train()
        run.audit()
        data = run.report()
        seconds = ledger.seconds()
    return QuickstartResult(
        report=run.folder / "report.html",
        report_json=run.folder / "report.json",
        headline=data["headline"],
        verdicts={model["name"]: model["verdict"] for model in data["models"]},
        seconds=round(time.monotonic() - started, 3),
        step_seconds=seconds,
        peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


class _Run:
    """One call; its methods are groups of steps, in order."""

    def __init__(
        self,
        config: QuickstartConfig,
        console: Console,
        ledger: Ledger,
        closes: sources.Closes,
    ) -> None:
        self.folder = config.output_dir
        self._config = config
        self._console = console
        self._ledger = ledger
        self._closes = closes
        self._base = None if config.model is None else self.folder / "base"

    def _say(self, text: str) -> None:
        self._console.print(f"      {text}", markup=False, highlight=False, soft_wrap=True)

    # -- text ------------------------------------------------------------------------------

    def text(self) -> None:
        """Documents, the given model, corpus."""
        config, ledger = self._config, self._ledger
        ledger.step(
            "documents",
            "Dated text: presidential addresses since 1790",
            lambda _: self._documents(),
            settings={"version": sources.version(sources.TEXT_DISTRIBUTION)},
        )
        after = ["documents"]
        if config.model is not None:
            model, base = config.model, self.folder / "base"
            ledger.step(
                "base",
                f"Model to continue from: {model}",
                lambda _: self._say(open_base(model, base)),
                settings=config.text_key(),
            )
            after.append("base")
        ledger.step(
            "corpus",
            f"Point-in-time corpus, cut at {config.cutoff}",
            lambda _: self._corpus(),
            settings=config.text_key(),
            after=tuple(after),
        )

    def _documents(self) -> None:
        num_documents = sources.write_documents(self.folder / "documents.jsonl")
        self._say(f"{num_documents} documents")

    def _last_day(self) -> date:
        with (self.folder / "documents.jsonl").open(encoding="utf-8") as lines:
            return max(date.fromisoformat(json.loads(line)["published_at"]) for line in lines)

    def _corpus(self) -> None:
        from headrace.corpus.build import build_corpus  # noqa: PLC0415 (only where it is not done)
        from headrace.corpus.config import config_from  # noqa: PLC0415 (as above)

        tokenizer = None if self._base is None else self._base
        built = build_corpus(config_from(self._config.corpus(self._last_day(), tokenizer)))
        for vintage in built.vintages:
            tokens = vintage.num_tokens or 0
            self._say(f"{vintage.path.name}: {vintage.num_documents} documents, {tokens:,} tokens")

    # -- training --------------------------------------------------------------------------

    def train(self) -> None:
        """One run a vintage."""
        for name in self._config.trained_names:
            self._ledger.step(
                f"train-{name}",
                f"Training all weights of {name}",
                partial(self._train, name),
                settings=self._config.training_key(),
                after=("corpus",),
            )

    def _train(self, name: str, resumed: bool) -> None:
        from headrace.trainer import train  # noqa: PLC0415 (seconds; only where it is not done)

        settings = self._config.training(name, self._base)
        settings["resume_from_checkpoint"] = "auto" if resumed else False
        settings["overwrite_output_dir"] = not resumed
        result = train(settings, console=self._console)
        if result.status != "finished":
            stopped = HeadraceError(
                f"training of {name} was stopped at step {result.step} of {result.num_steps}; the "
                "same command goes on from there",
                remedy=None,  # one line: it was asked for
            )
            stopped.exit_code = result.exit_code or stopped.exit_code  # of the signal
            raise stopped

    def _checkpoint(self, name: str) -> Path:
        from headrace.store.checkpoint import latest_checkpoint  # noqa: PLC0415 (loads torch)

        found = latest_checkpoint(self.folder / "runs" / name)
        if found is None:
            raise HeadraceError(
                f"{self.folder / 'runs' / name} holds no complete checkpoint",
                remedy=f"delete {self.folder / '.steps'} and run again",
            )
        return found

    # -- audit -----------------------------------------------------------------------------

    def audit(self) -> None:
        """Panel, embeddings, statistics."""
        config, ledger = self._config, self._ledger
        trained = tuple(f"train-{name}" for name in config.trained_names)
        ledger.step(
            "panel",
            f"Price panel: daily returns of {config.panel.num_entities} stocks",
            lambda _: self._panel(),
            settings=config.panel_key() | {"sha256": self._closes.sha256},
        )
        ledger.step(
            "embeddings",
            f"Embeddings: {2 + config.num_twins} networks read the panel's prompts",
            lambda _: self._embed(),
            settings={"num_twins": config.num_twins, "seed": config.seed},
            after=(*trained, "panel"),
        )
        model_cutoff = None if config.model_cutoff is None else str(config.model_cutoff)
        ledger.step(
            "audit",
            "Audit: shifted dates, twins, before and after the cutoff",
            lambda _: self._audit(),
            settings={"num_shifts": config.num_shifts, "model_cutoff": model_cutoff},
            after=("embeddings",),
        )

    def _panel(self) -> None:
        frame = build_panel(self._closes, self._config.panel)
        path = self.folder / "panel.parquet"
        partial = path.with_name(f".{path.name}.writing")
        frame.write_parquet(partial)
        partial.replace(path)
        self._say(f"{frame.height:,} forecasts, {frame['embedded'].sum():,} of them with prompts")

    def _read_panel(self) -> Panel:
        from headrace.audit import read_panel  # noqa: PLC0415 (only where it is not done)

        origin = (
            f"Closes from {sources.PRICE_DISTRIBUTION} {self._closes.version} "
            f"({sources.PRICE_LICENCE}), SHA-256 {self._closes.sha256[:16]}."
        )
        panel = read_panel(
            self.folder / "panel.parquet", name=f"S&P 500, {self._config.panel.num_entities} stocks"
        )
        return dataclasses.replace(panel, notes=(*sources.PRICE_CAVEATS, origin))

    def _networks(self) -> list[Network]:
        config = self._config
        cut = self._checkpoint(config.cut_name)
        other = self._base if self._base is not None else self._checkpoint(config.other_name)
        networks = [
            Network(name=config.cut_name, folder=cut),
            Network(name=config.other_name, folder=other),
        ]
        # Twins share the architecture, so both models have the same ones.
        first = 1000 * (config.seed + 1)
        return networks + [
            Network(name=f"twin-{index + 1}", folder=other, untrained=first + index)
            for index in range(config.num_twins)
        ]

    def _embed(self) -> None:
        embed_networks(
            self._read_panel(),
            self._networks(),
            out=self.folder / "embeddings",
            cache_dir=self.folder / "cache" / "vectors",
            say=self._say,
        )

    def _audit(self) -> None:
        from headrace.audit import AuditConfig, run_audit, write_json  # noqa: PLC0415 (as above)
        from headrace.audit.sources import source_from_file  # noqa: PLC0415 (as above)

        config = self._config
        found = {
            network.name: source_from_file(self.folder / "embeddings" / f"{network.name}.parquet")
            for network in self._networks()
        }
        models = (config.cut_name, config.other_name)
        result = run_audit(
            self._read_panel(),
            {name: found[name] for name in models},
            self._cutoffs(),
            twins={name: found[name] for name in found if name not in models},
            reductions=[(config.other_name, config.cut_name)],
            config=AuditConfig(num_shifts=config.num_shifts, seed=config.seed),
            progress=self._say,
        )
        write_json(result, self.folder / "audit.json")

    def _cutoffs(self) -> dict[str, str]:
        config = self._config
        if config.model is None:
            return {
                config.cut_name: config.cutoff.isoformat(),
                config.other_name: self._last_day().isoformat(),
            }
        if config.model_cutoff is None:
            return {}
        # What the base knows stays known: continued training moves no cutoff back.
        later = max(config.cutoff, config.model_cutoff).isoformat()
        return {config.cut_name: later, config.other_name: config.model_cutoff.isoformat()}

    # -- report ----------------------------------------------------------------------------

    def report(self) -> dict[str, Any]:
        """The report; made anew each time, from the records."""
        from headrace.report.render import write_report  # noqa: PLC0415 (loads matplotlib)

        config = self._config
        data: dict[str, Any] = {}

        def write(_: bool) -> None:
            data.update(
                write_report(
                    out=self.folder / "report.html",
                    json_out=self.folder / "report.json",
                    corpora=[config.corpus_dir],
                    runs=[self.folder / "runs" / name for name in config.trained_names],
                    audit=self.folder / "audit.json",
                    title="Quickstart",
                    introduction=self._introduction(),
                )
            )

        self._ledger.step("report", "Report", write, settings={}, after=("audit",), always=True)
        return data

    def _introduction(self) -> str:
        config = self._config
        if config.model is None:
            return (
                "Two small models were trained from scratch on presidential addresses: "
                f"{config.cut_name} on those given by {config.cutoff}, {config.other_name} on all "
                "of them. Neither has read about share prices, so no skill is the answer to "
                "expect. What this page shows is the whole procedure on real data, and how "
                "large a skill it would have seen."
            )
        return (
            f"{config.cut_name} continues {config.other_name} for {config.num_steps} steps on "
            f"presidential addresses given by {config.cutoff}. Continued training cannot remove "
            "what the base model knows: the question is what it changes, and how surely."
        )
