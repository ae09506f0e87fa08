"""From a page to one HTML file and one JSON file, written whole or not at all.

The HTML holds its style and figures; it names no address and runs no script, and a content
security policy in it forbids both.
"""

from __future__ import annotations

import json
import os
from importlib import resources
from typing import TYPE_CHECKING, Any

import headrace
from headrace.errors import HeadraceError
from headrace.report.build import (
    DEFAULT_TITLE,
    build_page,
    read_records,
    to_json,
)
from headrace.report.page import Facts, Heading, Note, Page, Picture, Table

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def render_html(page: Page) -> str:
    """The page as one self-contained HTML document, also well-formed XML after its doctype."""
    import jinja2  # noqa: PLC0415 (not needed to read records)

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    for name, kind in (
        ("picture", Picture),
        ("table", Table),
        ("facts", Facts),
        ("note", Note),
        ("heading", Heading),
    ):
        environment.tests[name] = lambda item, kind=kind: isinstance(item, kind)
    folder = resources.files("headrace.report")
    template = environment.from_string(folder.joinpath("page.html.j2").read_text("utf-8"))
    css = folder.joinpath("style.css").read_text("utf-8")
    return template.render(page=page, css=_safe(css), version=headrace.__version__)


def _safe(css: str) -> Any:
    import markupsafe  # noqa: PLC0415 (comes with jinja2)

    return markupsafe.Markup(css)  # noqa: S704 (our own file, not input)


def write_report(
    *,
    out: Path,
    json_out: Path | None = None,
    corpora: Sequence[Path] = (),
    runs: Sequence[Path] = (),
    audit: Path | None = None,
    title: str = DEFAULT_TITLE,
    introduction: str = "",
) -> dict[str, Any]:
    """Read the records, write ``out`` (HTML) and ``json_out``, and return what the JSON holds.

    ``introduction`` is a paragraph that stands before the verdicts.

    Raises:
        ConfigError: nothing to report on, or a path is not there.
        DataError: a record is not what it should be; nothing is written then.
    """
    found = read_records(corpora=corpora, runs=runs, audit=audit)
    page, quantities = build_page(found, title=title, introduction=introduction)
    html = render_html(page)
    data = to_json(page, quantities, found.sources)
    _write(out, html)
    if json_out is not None:
        _write(json_out, json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    return data


def _write(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("w", encoding="utf-8") as handle:
            handle.write(text)
            handle.flush()
            os.fsync(handle.fileno())
        partial.replace(path)
    except OSError as error:
        raise HeadraceError(
            f"cannot write {path}: {error.strerror}",
            remedy="free space, or write the report elsewhere",
        ) from error
    finally:
        partial.unlink(missing_ok=True)
