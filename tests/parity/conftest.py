"""Results of the family tests as JSON, from which docs/models.md is made."""

import json
from pathlib import Path

import pytest


def pytest_addoption(parser):
    parser.addoption(
        "--families-json", default=None, help="Write what the family tests found to this file."
    )


@pytest.fixture(scope="session")
def _family_rows(request):
    rows = {}
    yield rows
    target = request.config.getoption("--families-json", None)
    if target is not None:
        Path(target).write_text(json.dumps(rows, indent=1), encoding="utf-8")


@pytest.fixture
def record_family(_family_rows):
    """Keeps a family's verdict for the table."""

    def record(family, verdict):
        _family_rows[family] = verdict.to_dict()

    return record
