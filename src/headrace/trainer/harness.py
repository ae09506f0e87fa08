"""lm-evaluation-harness on the live weights: benchmarks while training, nothing exported.

Owns the model that the harness sees: log-likelihoods computed by the engine's own forward, wave by
wave, with the memory of a step. The invariant: what is scored is the weights of this step. Tasks
that generate text are refused, for a streamed model would be sent once a token. The harness reads
its tasks' data itself, from the hub's cache or the network, or from ``lm_eval_include_path``.
"""

from __future__ import annotations

import importlib.util
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from headrace.batch import IGNORE_INDEX, MicroBatch
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from headrace.engine import Engine
    from headrace.trainer.config import TrainConfig

    Request = tuple[Any, list[int], list[int]]


def check_harness(config: TrainConfig, tokenizer: Any) -> None:
    """Refuse ``lm_eval_tasks`` that cannot be run, before anything long begins.

    Raises:
        ConfigError: the harness is not installed, or there is no tokenizer.
    """
    if not config.lm_eval_tasks:
        return
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError(
            "lm_eval_tasks needs EleutherAI's lm-evaluation-harness, which is not installed",
            remedy="pip install 'headrace[eval]'",
        )
    if tokenizer is None or tokenizer.eos_token_id is None:
        raise ConfigError(
            "lm_eval_tasks need a tokenizer with an end-of-sequence token",
            remedy="name one with tokenizer_name_or_path:",
        )


class Harness:
    """Runs the tasks of a configuration.

    Args:
        engine: holds the weights.
        tokenizer: of the model.
        config: the run.
    """

    def __init__(self, engine: Engine, tokenizer: Any, config: TrainConfig) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._config = config
        self._manager: Any = None

    def run(self) -> dict[str, float]:
        """``lm_eval_TASK_METRIC`` of every task.

        Raises:
            ConfigError: a task is unknown, generates text, or its data cannot be had.
        """
        from lm_eval import simple_evaluate  # noqa: PLC0415 - an extra, with seconds of imports
        from lm_eval.tasks import TaskManager  # noqa: PLC0415 - as above

        config = self._config
        if self._manager is None:
            self._manager = TaskManager(include_path=config.lm_eval_include_path)
        try:
            found = simple_evaluate(
                model=live_model(self._engine, self._tokenizer, config),
                tasks=list(config.lm_eval_tasks),
                limit=config.lm_eval_limit,
                task_manager=self._manager,
                bootstrap_iters=0,
                log_samples=False,
                random_seed=config.seed,
                numpy_random_seed=abs(config.seed) % 2**32,
                torch_random_seed=config.seed,
                fewshot_random_seed=config.seed,
            )
        except (KeyError, ValueError, OSError, NotImplementedError) as error:
            raise ConfigError(
                f"lm_eval_tasks: {', '.join(config.lm_eval_tasks)}: {error!r}",
                remedy="lm_eval ls tasks lists the names; their data must be reachable",
            ) from error
        return {
            f"lm_eval_{task}_{metric.removesuffix(',none')}": float(value)
            for task, figures in sorted(found["results"].items())
            for metric, value in figures.items()
            if isinstance(value, int | float) and "," in metric and "_stderr" not in metric
        }


def live_model(engine: Engine, tokenizer: Any, config: TrainConfig) -> Any:
    """The model that the harness sees, an ``lm_eval.api.model.TemplateLM``."""
    from lm_eval.api.model import TemplateLM  # noqa: PLC0415 - an extra

    class LiveModel(TemplateLM):  # type: ignore[misc]  # untyped
        tokenizer_name = getattr(tokenizer, "name_or_path", "")

        @property
        def eot_token_id(self) -> int:
            return int(tokenizer.eos_token_id)

        def tok_encode(
            self, string: str, add_special_tokens: bool | None = None, **_: Any
        ) -> list[int]:
            ids = tokenizer(string, add_special_tokens=bool(add_special_tokens))["input_ids"]
            return [int(token) for token in ids]

        def _loglikelihood_tokens(
            self, requests: Sequence[Request], **_: Any
        ) -> list[tuple[float, bool]]:
            return score_requests(
                engine,
                [(context, continuation) for _, context, continuation in requests],
                max_length=config.max_length,
                rows=config.per_device_eval_batch_size,
                group=config.gradient_accumulation_steps,
            )

        def loglikelihood_rolling(
            self, requests: Sequence[Any], disable_tqdm: bool = False
        ) -> list[float]:
            del disable_tqdm
            totals = []
            for request in requests:
                ids = self.tok_encode(request.args[0])
                # Disjoint windows; each sees as much before it as there is room for.
                step = max(1, config.max_length // 2)
                windows = [
                    (([self.eot_token_id, *ids[:start]])[-step:], ids[start : start + step])
                    for start in range(0, len(ids), step)
                ]
                scored = self._loglikelihood_tokens([(None, *window) for window in windows])
                totals.append(sum(logprob for logprob, _ in scored))
            return totals

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> Any:
            raise NotImplementedError(
                "a task generates text; headrace scores log-likelihoods (a streamed model would "
                "be sent once a token)"
            )

    return LiveModel()


def score_requests(
    engine: Engine,
    requests: Sequence[tuple[list[int], list[int]]],
    *,
    max_length: int,
    rows: int,
    group: int,
) -> list[tuple[float, bool]]:
    """Log-likelihood of each continuation after its context, and whether it is the greedy one.

    Args:
        engine: holds the weights.
        requests: token ids of context and continuation; contexts are cut on the left.
        max_length: positions of a row.
        rows: of a micro-batch.
        group: micro-batches that are scored at a time.
    """
    order = sorted(range(len(requests)), key=lambda n: -sum(map(len, requests[n])))
    results: dict[int, tuple[float, bool]] = {}
    batches = _batches([requests[n] for n in order], max_length, rows)
    done = 0
    while micro_batches := list(islice(batches, group)):
        for scores in engine.score(micro_batches):
            for logprobs_T, greedy_T in zip(scores.logprobs_BT, scores.greedy_BT, strict=True):
                results[order[done]] = (float(logprobs_T.double().sum()), bool(greedy_T.all()))
                done += 1
    return [results[n] for n in range(len(requests))]


def _batches(
    requests: Sequence[tuple[list[int], list[int]]], max_length: int, rows: int
) -> Iterator[MicroBatch]:
    for first in range(0, len(requests), rows):
        chosen = requests[first : first + rows]
        sequences = [
            (context + continuation)[-(max_length + 1) :] for context, continuation in chosen
        ]
        length = max(2, *(len(sequence) - 1 for sequence in sequences))
        inputs_BT = torch.zeros(len(chosen), length, dtype=torch.int64)
        targets_BT = torch.full_like(inputs_BT, IGNORE_INDEX)
        for row, (sequence, (_, continuation)) in enumerate(zip(sequences, chosen, strict=True)):
            size = len(sequence) - 1
            inputs_BT[row, :size] = torch.tensor(sequence[:-1])
            supervised = min(len(continuation), size)
            targets_BT[row, size - supervised : size] = torch.tensor(sequence[-supervised:])
        yield MicroBatch(
            input_ids_BT=inputs_BT,
            targets_BT=targets_BT,
            position_ids_BT=torch.arange(length).expand_as(inputs_BT),
        )
