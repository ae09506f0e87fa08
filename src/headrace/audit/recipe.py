"""YAML recipes: a panel, models, twins and settings in one file.

Owns the recipe's keys. The invariant: an unknown key is an error that names the nearest known
one, and every file is looked for before anything is computed. Paths are relative to the current
directory. A recipe and the command line's options give the same request.

::

    panel:
      type: jpx                    # or generic: a Parquet or CSV panel
      path: data/jpx/stock_prices.csv
      sample: vessl-2026           # or point_in_time
      synthetic: {num_securities: 200}   # written to path where nothing is there
    models:
      - {name: base, embeddings: base.parquet, cutoff: 2024-06-30}
      - {name: planted, synthetic: {leak: 0.03}, cutoff: 2020-03-31}
    twins:
      - {name: twin 0, embeddings: twin0.parquet}
    reductions: [[base, planted]]
    published: {num_draws: 200}
    settings: {num_shifts: 199}
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from headrace.audit.config import AuditConfig, parse_date
from headrace.audit.jpx import jpx_panel, read_jpx
from headrace.audit.panel_files import read_panel
from headrace.audit.perplexity import read_losses
from headrace.audit.published_defects import PublishedOptions
from headrace.audit.published_jpx import PublishedFacts, published_panel
from headrace.audit.recall import RecallAnswers, read_answers
from headrace.audit.recipe_values import mapping, settings, whole
from headrace.audit.records import CHANNELS, PerplexityRecord
from headrace.audit.request import AuditRequest
from headrace.audit.sources import EmbeddingSource, source_from_file
from headrace.audit.synthetic_embeddings import draw_embeddings, knowledge_of_panel
from headrace.audit.synthetic_jpx import SyntheticJpxConfig, write_synthetic_jpx
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.audit.panel import Panel

_TOP = ("panel", "models", "twins", "reference", "reductions", "published", "settings")
_PANEL = ("type", "path", "sample", "num_entities", "dates_per_entity", "seed", "synthetic")
_MODEL = ("name", "embeddings", "synthetic", "cutoff", "recall", "perplexity")
_SAMPLES = ("vessl-2026", "point_in_time")
_SHOWN = "docs/audit.md shows a recipe with its keys"


@dataclass(frozen=True, kw_only=True)
class SyntheticModel:
    """An embedding drawn for the recipe's panel: knowledge of stated size, or none.

    Attributes:
        network: ``"digits"`` or ``"calendar"``.
        dimension: of the vectors.
        leak: share of var(y) known before the model's cutoff, in each channel.
        skill: share known on every date.
        seed: of the network.
        num_twins: untrained networks that read the same prompts (in ``twins`` only).
    """

    network: str = "digits"
    dimension: int = 64
    leak: float = 0.0
    skill: float = 0.0
    seed: int = 0
    num_twins: int = 4


def _load(path: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"no recipe at {path}", remedy="check the path") from error
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read as a recipe: {error.strerror}",
            remedy="give a YAML file that can be read",
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not UTF-8 text, so it is no recipe", remedy="save it as UTF-8"
        ) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}", remedy="correct that line") from error
    recipe = mapping(data, str(path), _TOP)
    if "panel" not in recipe:
        raise ConfigError(f"{path} has no panel", remedy=_SHOWN)
    return recipe


def panel_from_recipe(path: Path) -> tuple[Panel, PublishedFacts | None]:
    """The panel of a recipe, and what its price file says about the published choices.

    Raises:
        ConfigError: an unknown key or type, or a missing file.
        DataError: a panel that cannot be used.
    """
    return _panel(_load(path)["panel"], f"{path}: panel")


def _panel(value: Any, where: str) -> tuple[Panel, PublishedFacts | None]:
    options = mapping(value, where, _PANEL)
    if "path" not in options:
        raise ConfigError(f"{where} has no path", remedy=_SHOWN)
    path = Path(str(options["path"]))
    kind = options.get("type", "generic")
    if kind == "generic":
        return read_panel(path), None
    if kind != "jpx":
        raise ConfigError(
            f"{where}: type {kind!r} is neither generic nor jpx",
            remedy="type: generic, or type: jpx",
        )
    if "synthetic" in options and not path.exists():
        config = settings(SyntheticJpxConfig, options["synthetic"], f"{where}.synthetic")
        write_synthetic_jpx(path, config)
    prices = read_jpx(path)
    sample = options.get("sample", "point_in_time")
    given = ("num_entities", "dates_per_entity")
    sizes: dict[str, Any] = {
        key: whole(options[key], f"{where}.{key}") for key in given if key in options
    }
    if sample == "vessl-2026":
        return published_panel(prices, **sizes)
    if sample != "point_in_time":
        raise ConfigError(
            f"{where}: sample {sample!r} is none of {', '.join(_SAMPLES)}",
            remedy=f"sample: {_SAMPLES[-1]}, or leave it out",
        )
    if "seed" in options:
        sizes["seed"] = whole(options["seed"], f"{where}.seed")
    return jpx_panel(prices, **sizes), None


def request_from_recipe(path: Path) -> AuditRequest:
    """Read a recipe and everything it names.

    Raises:
        ConfigError: an unknown key, a missing file, or a model without vectors.
        DataError: a panel that cannot be used.
    """
    recipe = _load(path)
    models = recipe.get("models") or []
    if not models:
        raise ConfigError(f"{path} names no models", remedy=_SHOWN)
    for kind in ("models", "twins"):
        if not isinstance(recipe.get(kind) or [], list):
            raise ConfigError(
                f"{path}: {kind} is no list", remedy="begin each entry with '- name:'"
            )
        for k, entry in enumerate(recipe.get(kind) or []):
            _check_entry(entry, f"{path}: {kind}[{k}]")
    panel, facts = _panel(recipe["panel"], f"{path}: panel")
    embeddings: dict[str, EmbeddingSource] = {}
    cutoffs: dict[str, str] = {}
    recall: dict[str, RecallAnswers] = {}
    perplexity: dict[str, tuple[PerplexityRecord, ...]] = {}
    for k, entry in enumerate(models):
        name = str(entry["name"])
        if name in embeddings:
            raise ConfigError(
                f"{path}: models[{k}]: {name!r} is named twice",
                remedy="give each model a name of its own",
            )
        if "cutoff" in entry:
            cutoffs[name] = str(entry["cutoff"])
        where = f"{path}: models[{k}].synthetic"
        embeddings[name] = _source(entry, panel, cutoffs.get(name), where)
        if "recall" in entry:
            recall[name] = read_answers(Path(str(entry["recall"])))
        if "perplexity" in entry:
            stack = embeddings[name].fingerprint
            perplexity[name] = read_losses(Path(str(entry["perplexity"])), stack=stack)
    twins: dict[str, EmbeddingSource] = {}
    for k, entry in enumerate(recipe.get("twins") or []):
        if "synthetic" in entry:
            drawn = settings(SyntheticModel, entry["synthetic"], f"{path}: twins[{k}].synthetic")
            twins |= _synthetic_twins(drawn, panel, str(entry["name"]))
        else:
            twins[str(entry["name"])] = source_from_file(Path(str(entry["embeddings"])))
    published = None
    if "published" in recipe:
        published = settings(
            PublishedOptions, recipe["published"], f"{path}: published", without="facts"
        )
        published = dataclasses.replace(published, facts=facts)
    return AuditRequest(
        panel=panel,
        embeddings=embeddings,
        cutoffs=cutoffs,
        twins=twins,
        reference=recipe.get("reference"),
        reductions=_pairs(recipe.get("reductions") or [], f"{path}: reductions"),
        recall=recall,
        perplexity=perplexity,
        published=published,
        config=settings(AuditConfig, recipe.get("settings"), f"{path}: settings"),
    )


def _pairs(value: Any, where: str) -> tuple[tuple[str, str], ...]:
    pairs = value if isinstance(value, list) else [value]
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2:
            raise ConfigError(
                f"{where} holds {pair!r}, which is no pair of models",
                remedy="write [[BASE, TRAINED], ...]",
            )
    return tuple((str(base), str(trained)) for base, trained in pairs)


def _check_entry(entry: Any, where: str) -> None:
    mapping(entry, where, _MODEL)
    if "name" not in entry:
        raise ConfigError(f"{where} has no name", remedy=_SHOWN)
    if ("embeddings" in entry) == ("synthetic" in entry):
        raise ConfigError(
            f"{where}: give embeddings (a file) or synthetic, one of the two",
            remedy=_SHOWN,
        )
    if "embeddings" in entry and not Path(str(entry["embeddings"])).is_file():
        raise ConfigError(
            f"{where}: no file at {entry['embeddings']}",
            remedy="make it with headrace embed --panel RECIPE.yaml --model FOLDER --out FILE",
        )


def _source(entry: dict[str, Any], panel: Panel, cutoff: str | None, where: str) -> EmbeddingSource:
    if "embeddings" in entry:
        return source_from_file(Path(str(entry["embeddings"])))
    model = settings(SyntheticModel, entry["synthetic"], where)
    knowledge = []
    if model.leak:
        if cutoff is None:
            raise ConfigError(
                f"{where}: a leak needs a cutoff to end at",
                remedy="give the model a cutoff, or leave leak out",
            )
        last = parse_date(cutoff, f"{where}: cutoff")
        knowledge += knowledge_of_panel(panel, share=model.leak, channels=CHANNELS, cutoff=last)
    if model.skill:
        knowledge += knowledge_of_panel(panel, share=model.skill, channels=CHANNELS, cutoff=None)
    held = min((planted.signal.var() for planted in knowledge), default=1.0)
    if max(model.leak, model.skill) >= held:
        raise ConfigError(
            f"{where}: {max(model.leak, model.skill):g} of var(y) is planted in a channel that "
            f"holds {held:.3g} of it",
            remedy="plant less",
        )
    vectors, _ = draw_embeddings(
        panel,
        knowledge,
        network=model.network,  # type: ignore[arg-type]  # checked there
        dimension=model.dimension,
        num_twins=0,
        seed=model.seed,
    )
    return EmbeddingSource(values=vectors, source=f"synthetic {model.network} network")


def _synthetic_twins(model: SyntheticModel, panel: Panel, name: str) -> dict[str, EmbeddingSource]:
    _, twins = draw_embeddings(
        panel,
        [],
        network=model.network,  # type: ignore[arg-type]  # checked there
        dimension=model.dimension,
        num_twins=model.num_twins,
        seed=model.seed,
    )
    return {
        f"{name} {k}": EmbeddingSource(values=values, source=f"synthetic {model.network} network")
        for k, values in enumerate(twins.values())
    }
