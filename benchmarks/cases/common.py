"""What every case shares: models by shape, tokens by seed, memory and time as they are reported.

Invariant: headrace and its rivals get the same configuration, the same token ids for a step's
number and the same formula of model FLOPs. Nothing is downloaded.

Shape legend: N sequences of a step, T positions.
"""

from __future__ import annotations

import json
import resource
import statistics
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    import torch

    from headrace.models.spec import ModelSpec

SEQUENCE = 4096
LEARNING_RATE = 1e-5
MAX_GRAD_NORM = 1.0
WARM_UP = 2

_HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
SHAPES: dict[str, dict[str, Any]] = {
    "smoke": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
              "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
              "vocab_size": 256, "tie_word_embeddings": True},
    "tiny": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4,
             "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
             "vocab_size": 8192, "tie_word_embeddings": False},
    "small": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 8,
              "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64,
              "vocab_size": 8192, "tie_word_embeddings": False},
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
             "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
             "vocab_size": 151936, "tie_word_embeddings": True},
    "4b": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
           **_HEADS, "vocab_size": 151936, "tie_word_embeddings": True},
    "8b": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
           **_HEADS, "vocab_size": 151936, "tie_word_embeddings": False},
    "14b": {"hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 40,
            **_HEADS, "num_attention_heads": 40, "vocab_size": 151936,
            "tie_word_embeddings": False},
}  # fmt: skip
"""Qwen3's published sizes, and three for checks."""

_EXPERTS = {"norm_topk_prob": True, "tie_word_embeddings": False}
EXPERT_SHAPES: dict[str, dict[str, Any]] = {
    "smoke-moe": {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32,
                  "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
                  "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, "vocab_size": 256,
                  **_EXPERTS},
    "30b-a3b": {"hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
                "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
                "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
                "vocab_size": 151936, **_EXPERTS},
}  # fmt: skip
"""Qwen3-30B-A3B's published sizes, and a model for checks."""


def qwen3_config(name: str, num_layers: int | None = None) -> Any:
    """A dense or mixture-of-experts Qwen3 by its name; fewer layers of the same shape if asked."""
    from transformers import Qwen3Config, Qwen3MoeConfig

    dense = name in SHAPES
    values = SHAPES[name] if dense else EXPERT_SHAPES[name]
    if num_layers is not None:
        values = {**values, "num_hidden_layers": num_layers}
    return (Qwen3Config if dense else Qwen3MoeConfig)(max_position_embeddings=32768, **values)


def step_tokens(
    vocab_size: int, tokens: int, step: int, sequence: int = SEQUENCE
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and targets ``(N, T)`` of step number ``step``: uniform tokens, the last unsupervised.

    The same whoever asks, and however the rows are later cut into micro-batches.
    """
    import torch

    if tokens % sequence:
        raise ValueError(f"{tokens} tokens a step are no whole number of {sequence}-token rows")
    generator = torch.Generator().manual_seed(step)
    ids_NT = torch.randint(0, vocab_size, (tokens // sequence, sequence), generator=generator)
    targets_NT = torch.roll(ids_NT, -1, 1)
    targets_NT[:, -1] = -100
    return ids_NT, targets_NT


def micro_batches(
    ids_NT: torch.Tensor, targets_NT: torch.Tensor, rows: int, mean_document: int | None = None
) -> list[Any]:
    """The engine's micro-batches of up to ``rows`` full sequences.

    Args:
        ids_NT: token ids.
        targets_NT: their targets.
        rows: of a micro-batch.
        mean_document: pack every row full of documents of about that many tokens; None makes a
            row one document.
    """
    import torch

    from headrace.batch import MicroBatch

    length = ids_NT.shape[1]
    generator = torch.Generator().manual_seed(length)
    batches = []
    for ids_BT, targets_BT in zip(ids_NT.split(rows), targets_NT.split(rows), strict=True):
        if mean_document is None:
            positions_BT = torch.arange(length).expand_as(ids_BT).contiguous()
            batches.append(
                MicroBatch(input_ids_BT=ids_BT, targets_BT=targets_BT, position_ids_BT=positions_BT)
            )
            continue
        lengths = torch.cat([document_lengths(length, mean_document, generator) for _ in ids_BT])
        ends = lengths.cumsum(0)
        first = torch.repeat_interleave(ends - lengths, lengths)
        last = targets_BT.flatten().clone()
        last[ends - 1] = -100  # a document's last token predicts nothing of the next one
        batches.append(
            MicroBatch(
                input_ids_BT=ids_BT,
                targets_BT=last.view_as(targets_BT),
                position_ids_BT=(torch.arange(ids_BT.numel()) - first).view_as(ids_BT),
                cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.int64), ends]).int(),
            )
        )
    return batches


def document_lengths(total: int, mean: int, generator: torch.Generator) -> torch.Tensor:
    """Lengths that fill a row of ``total`` tokens: exponential around ``mean``, as web text is."""
    import torch

    lengths: list[int] = []
    left = total
    while left:
        drawn = torch.empty(1).exponential_(1 / mean, generator=generator).item()
        lengths.append(min(left, max(1, round(drawn))))
        left -= lengths[-1]
    return torch.tensor(lengths)


def speed(spec: ModelSpec, tokens: int, sequence: int, seconds: list[float]) -> dict[str, Any]:
    """Rates of steps that took ``seconds`` each: from the median, with the spread beside it."""
    from headrace.models.flops import flops_per_token

    middle = statistics.median(seconds)
    return {
        "seconds": middle,
        "fastest_seconds": min(seconds),
        "slowest_seconds": max(seconds),
        "step_seconds": seconds,
        "tokens_per_second": tokens / middle,
        "tflops": tokens / middle * flops_per_token(spec, sequence) / 1e12,
    }


class MemoryMeter:
    """Peaks of a process: device bytes that the allocator held, host bytes by two counts.

    Resident memory (``host_rss_gib``) misses what a driver maps for pinned buffers;
    ``host_used_gib`` is how much more of the machine was in use than at the start, sampled.
    """

    def __init__(self, device: torch.device, interval_seconds: float = 0.2) -> None:
        self._device = device
        self._interval = interval_seconds
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._before = self._most = _used_bytes()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._ended.wait(self._interval):
            self._most = max(self._most, _used_bytes())

    def reset_device(self) -> None:
        """Forget the device's peak so far."""
        import torch

        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def peaks(self) -> dict[str, float]:
        """GiB by name; ``host_peak_gib`` is the larger of the host's two counts."""
        import torch

        self._most = max(self._most, _used_bytes())
        cuda = self._device.type == "cuda"
        rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        used = self._most - self._before
        sizes = {
            "device_peak_gib": torch.cuda.max_memory_allocated() if cuda else 0,
            "device_reserved_gib": torch.cuda.max_memory_reserved() if cuda else 0,
            "host_peak_gib": max(rss, used),
            "host_rss_gib": rss,
            "host_used_gib": used,
        }
        return {name: size / 2**30 for name, size in sizes.items()}


def _used_bytes() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    total, available = (int(fields[name].split()[0]) for name in ("MemTotal", "MemAvailable"))
    return (total - available) * 1024


def synchronize(device: torch.device) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def default_device() -> torch.device:
    """The GPU, or where there is none the CPU: enough to see that a case runs."""
    import torch

    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def report(result: dict[str, Any]) -> None:
    """Print a result; a later line of the same process replaces it."""
    print(json.dumps(result), flush=True)
