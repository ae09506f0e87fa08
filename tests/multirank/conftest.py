"""Crews of ranks, one of each size for all modules: starting one costs seconds of imports."""

import pytest

from crew import Crew
from small_runs import corpus, make_config, run_config

__all__ = ["corpus", "make_config", "run_config"]


@pytest.fixture(scope="session")
def crews():
    """Makes, or hands out, the crew of a size."""
    made = {}

    def of(size):
        if size not in made:
            made[size] = Crew(size)
        return made[size]

    yield of
    for crew in made.values():
        crew.close()
