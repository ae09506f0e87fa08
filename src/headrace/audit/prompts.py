"""Prompts: what a model reads of a panel row.

Owns the templates. The invariant: a template's name holds its version, and the text it makes of
a row never changes under that name, because cached embeddings and published figures are keyed
by it. A prompt holds what was known on its date and nothing of the label.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.audit.panel import Panel


def _panel(panel: Panel, row: int) -> str:
    entity = panel.entities[panel.entity[row]]
    return f"Entity: {entity}\nDate: {panel.date_text(int(panel.session[row]))}\n" + _facts(
        panel, row
    )


def _no_date(panel: Panel, row: int) -> str:
    return f"Entity: {panel.entities[panel.entity[row]]}\n" + _facts(panel, row)


def _no_entity(panel: Panel, row: int) -> str:
    return f"Entity: X\nDate: {panel.date_text(int(panel.session[row]))}\n" + _facts(panel, row)


def _facts(panel: Panel, row: int) -> str:
    values = zip(panel.feature_names, panel.features[row], strict=True)
    lines = "".join(f"{name}: {value:.6g}\n" for name, value in values)
    return f"{lines}Outlook:"


def _vessl_2026(panel: Panel, row: int) -> str:
    """The prompt of the published evaluation, word for word, for panels of its features."""
    value = dict(zip(panel.feature_names, panel.features[row], strict=True))
    date = panel.date_text(int(panel.session[row]))
    code = panel.entities[panel.entity[row]]
    return (
        f"On {date}, Japanese Tokyo Stock Exchange securities code {code} "
        f"had recent 5-day log return {value['ret_5d']:+.4f}, "
        f"30-day log return {value['ret_30d']:+.4f}, "
        f"20-day volatility {value['vol_20d']:.4f}."
    )


def _text(panel: Panel, row: int) -> str:
    assert panel.prompts is not None
    return panel.prompts[row]


TEMPLATES: dict[str, tuple[str, Callable[[Panel, int], str]]] = {
    "panel/1": ("entity, date and features, a line each", _panel),
    "panel-no-date/1": ("ablation: the date left out", _no_date),
    "panel-no-entity/1": ("ablation: the entity's name masked", _no_entity),
    "vessl-2026/1": ("the published evaluation's prompt, for its JPX panel", _vessl_2026),
    "text/1": ("the panel's own column 'prompt'", _text),
}


def default_template(panel: Panel) -> str:
    """The panel's own text where it brings some."""
    return "panel/1" if panel.prompts is None else "text/1"


def render_prompts(panel: Panel, template: str) -> list[str]:
    """A prompt for each embedded row, in their order.

    Raises:
        ConfigError: an unknown template, or ``text/1`` for a panel without prompts.
    """
    if template not in TEMPLATES:
        known = "; ".join(f"{name} ({words})" for name, (words, _) in TEMPLATES.items())
        raise ConfigError(f"no prompt template {template!r}", remedy=f"use one of: {known}")
    if template == "text/1" and panel.prompts is None:
        raise ConfigError(
            f"template text/1 reads the column 'prompt', which panel {panel.name!r} lacks",
            remedy="give the panel that column, or choose another template",
        )
    needed = {"ret_5d", "ret_30d", "vol_20d"}
    if template == "vessl-2026/1" and not needed <= set(panel.feature_names):
        raise ConfigError(
            f"template vessl-2026/1 reads the features {', '.join(sorted(needed))}, which panel "
            f"{panel.name!r} lacks",
            remedy="give the panel those features, or choose another template",
        )
    render = TEMPLATES[template][1]
    return [render(panel, int(row)) for row in panel.embedded_rows]
