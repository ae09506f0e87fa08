"""Small complete trainings for every module."""

from small_runs import corpus, make_config, run_config

__all__ = ["corpus", "make_config", "run_config"]
