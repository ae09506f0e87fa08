"""Which cases a suite holds, in order of importance, and the targets that the headline is held to.

Sequences of 4096, clipping 1.0, whole steps. Seconds are what cases took or are expected to take
on one H200 with 16 cores; they only decide what is still begun under a budget.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.runner import Case

K = 1024


def headrace(model: str, tokens: int, *, name: str = "", seconds: float = 90, **more: Any) -> Case:
    """A case of headrace's own; placement is its search's unless ``options`` say otherwise."""
    return Case(
        name=name or f"{model}-{tokens // K}k",
        kind="train",
        arguments={"model": model, "tokens": tokens, **more},
        seconds=seconds,
    )


def fsdp2(
    model: str,
    tokens: int,
    *,
    rows: list[int],
    compiled: bool = False,
    checkpointing: str = "full",
    precision: str | None = None,
    offload: bool = False,
    seconds: float = 90,
) -> Case:
    """FSDP2; its name says what it is."""
    rival = "fsdp2-offload" if offload else "fsdp2"
    parts = [rival, "compiled" if compiled else "eager", checkpointing]
    if precision == "bfloat16":
        parts.append("bf16-state")
    return Case(
        name="-".join([*parts, model, f"{tokens // K}k"]),
        kind="rival",
        arguments={
            "rival": rival, "model": model, "tokens": tokens, "rows": rows,
            "precision": precision,
            "options": {"compiled": compiled, "checkpointing": checkpointing},
        },
        seconds=seconds,
    )  # fmt: skip


def zero_offload(
    model: str,
    tokens: int,
    *,
    rows: int,
    stage: int = 2,
    checkpointing: str = "full",
    seconds: float = 120,
) -> Case:
    """DeepSpeed ZeRO-Offload; building its host kernel takes half a minute of the first case."""
    return Case(
        name=f"zero{stage}-offload-{checkpointing}-rows{rows}-{model}-{tokens // K}k",
        kind="rival",
        arguments={
            "rival": "zero-offload", "model": model, "tokens": tokens, "rows": [rows],
            "stage": stage, "options": {"checkpointing": checkpointing},
        },
        seconds=seconds,
    )  # fmt: skip


PARITY = Case(name="parity", kind="parity", seconds=60)
CEILINGS = Case(name="ceilings", kind="ceilings", seconds=25)
HOST_UPDATE = Case(name="host-update", kind="host-update", seconds=40)

AGREEMENT = Case(name="loss200", kind="agreement", seconds=100, limit=400)
START = Case(name="start", kind="start", arguments={"model": "8b"}, seconds=200, limit=500)

PACKED = headrace("8b", 32 * K, name="packed-8b-32k", seconds=70, mean_document=1024)

BEST_RESIDENT = [
    fsdp2("8b", 32 * K, rows=[1, 2], compiled=True),
    fsdp2("8b", 32 * K, rows=[1], compiled=True, checkpointing="selective"),
]
FOUR_B_OFFLOAD = [
    fsdp2("4b", 32 * K, rows=[4, 8], compiled=True, offload=True),
    zero_offload("4b", 32 * K, rows=8),
]
MORE_RIVALS = [
    fsdp2("4b", 32 * K, rows=[2, 4, 8], compiled=True),
    fsdp2("4b", 32 * K, rows=[1, 2], compiled=True, checkpointing="selective"),
    fsdp2("4b", 32 * K, rows=[4, 8], offload=True),
    fsdp2("8b", 32 * K, rows=[1, 2]),
    fsdp2("8b", 32 * K, rows=[2, 4], compiled=True, checkpointing="selective",
          precision="bfloat16"),
    fsdp2("8b", 32 * K, rows=[2, 4, 8], compiled=True, precision="bfloat16"),
    fsdp2("4b", 32 * K, rows=[4, 8]),
    zero_offload("4b", 32 * K, rows=4, checkpointing="none"),
    zero_offload("4b", 32 * K, rows=8, stage=3),
    fsdp2("8b", 32 * K, rows=[8], offload=True, seconds=20),
    zero_offload("8b", 32 * K, rows=8, seconds=20),
]  # fmt: skip

CURVE_TOKENS = [8 * K, 16 * K, 32 * K, 64 * K, 128 * K]


def rival_curve(
    rival: str, model: str, rows: int, *, checkpointing: str = "full", seconds: float = 130
) -> Case:
    """A compiled FSDP2 at every number of tokens, built once."""
    return Case(
        name=f"curve-{rival}-compiled-{checkpointing}-{model}",
        kind="rival-curve",
        arguments={
            "rival": rival, "model": model, "rows": rows,
            "tokens": [count for count in CURVE_TOKENS if count >= rows * 4 * K],
            "options": {"compiled": True, "checkpointing": checkpointing},
        },
        seconds=seconds,
        limit=400,
    )  # fmt: skip


CURVE = [
    CEILINGS,
    *(headrace("4b", count, steps=3, seconds=60) for count in CURVE_TOKENS),
    rival_curve("fsdp2", "4b", 2),
    *(
        fsdp2("4b", count, rows=[min(8, count // (4 * K))], compiled=True, offload=True)
        for count in CURVE_TOKENS
    ),
    *(headrace("8b", count, steps=3) for count in CURVE_TOKENS),
    rival_curve("fsdp2", "8b", 1),
    *(zero_offload("4b", count, rows=min(8, count // (4 * K))) for count in CURVE_TOKENS),
]


def smoke(kind: str, name: str, **arguments: Any) -> Case:
    """The smallest run of a case, on a GPU or a CPU: does it work here at all."""
    return Case(name=f"smoke-{name}", kind=kind, arguments=arguments, seconds=20, limit=180)


MODELS = [
    Case(name="moe-30b-a3b-layers", kind="experts", seconds=90),
    Case(name="families-flex", kind="families", arguments={"names": ["Gemma 2", "gpt-oss"]},
         seconds=60),
    Case(name="families-gpu", kind="families", seconds=200, limit=400),
    Case(name="hybrid-kernel", kind="hybrid", seconds=90),
    headrace("30b-a3b", 32 * K, name="moe-30b-a3b-step", num_layers=8,
             options={"recompute_layers": 0}, seconds=100),
]  # fmt: skip

RECOMPUTE = [
    Case(name="recompute-14b", kind="recompute", arguments={"model": "14b"}, seconds=80),
    Case(name="recompute-8b", kind="recompute", arguments={"model": "8b", "rows": 8}, seconds=80),
]

_SMALL = {"model": "smoke", "tokens": 256, "sequence": 64, "steps": 1}

SMOKE = [
    smoke("parity", "parity", model="smoke", sequence=64),
    smoke("ceilings", "ceilings", models=["smoke"], tokens=64, size=256, copy_bytes=1 << 20),
    smoke("host-update", "host-update", num_parameters=1_000_000, num_rounds=1),
    smoke("train", "train", **_SMALL),
    smoke("train", "profile", trace="trace-smoke.json", **_SMALL),
    smoke("train", "packed", mean_document=16, **_SMALL),
    smoke("rival", "fsdp2", rival="fsdp2", rows=[1, 2], **_SMALL),
    smoke("rival", "fsdp2-bf16-state", rival="fsdp2", rows=[2], precision="bfloat16", **_SMALL),
    smoke("rival", "fsdp2-offload", rival="fsdp2-offload", rows=[2], **_SMALL),
    smoke("rival", "fsdp2-compiled", rival="fsdp2", rows=[2],
          options={"compiled": True, "checkpointing": "selective"}, **_SMALL),
    smoke("rival", "fsdp2-offload-compiled", rival="fsdp2-offload", rows=[2],
          options={"compiled": True}, **_SMALL),
    smoke("rival-curve", "fsdp2-curve", rival="fsdp2", model="smoke", tokens=[128, 256], rows=1,
          sequence=64, steps=1),
    smoke("agreement", "loss", model="smoke", steps=12, num_sequences=4, sequence=32, rows=2,
          warm_up=2, learning_rate=1e-2),
    smoke("start", "start", model="smoke", tokens=256, sequence=64),
    smoke("experts", "experts", model="smoke-moe", num_layers=2, rows=2, sequence=64, repeats=1),
    smoke("recompute", "recompute", model="smoke", num_layers=1, rows=2, sequence=64, repeats=1,
          turns=1),
    smoke("families", "families", names=["Qwen3-MoE"], compiled=False),
    smoke("hybrid", "hybrid", tokens=200, documents=3, heads=2, size=16, repeats=1,
          compiled=False),
    smoke("rival", "zero2-offload", rival="zero-offload", rows=[2], **_SMALL),
]  # fmt: skip

SUITES: dict[str, list[Case]] = {
    "smoke": SMOKE,
    "parity": [PARITY],
    "rivals": [CEILINGS, *BEST_RESIDENT, *FOUR_B_OFFLOAD, *MORE_RIVALS],
    "headline": [
        PARITY,
        CEILINGS,
        headrace("8b", 32 * K),
        PACKED,
        HOST_UPDATE,
        headrace("4b", 32 * K),
        headrace("8b", 8 * K),
        headrace("4b", 32 * K, name="4b-32k-in-16gib", device_gib=16),
        headrace("14b", 64 * K, seconds=150),
        headrace("8b", 128 * K, seconds=120),
        *BEST_RESIDENT,
        *FOUR_B_OFFLOAD,
        START,
        AGREEMENT,
    ],
    "start": [PARITY, START],
    "loss200": [PARITY, AGREEMENT],
    "packing": [PARITY, headrace("8b", 32 * K), PACKED],
    "curve": CURVE,
    "models": MODELS,
    "recompute": RECOMPUTE,
    "profile": [
        CEILINGS,
        headrace("8b", 32 * K, name="profile-8b-32k", trace="trace-8b-32k.json"),
        headrace("4b", 32 * K, name="profile-4b-32k", trace="trace-4b-32k.json"),
        headrace("8b", 8 * K, name="profile-8b-8k", trace="trace-8b-8k.json"),
    ],
}

Reading = Literal["at least", "at most"]


@dataclass(frozen=True, kw_only=True)
class Target:
    """What a row of the headline is held to.

    Attributes:
        row: the case in words.
        case: whose result is judged.
        measure: where in the result, dots between levels.
        unit: of the value, for the table.
        bound: the target.
        reading: which side of it passes.
        over: a case's name, or the start of several, and a measure: the value is divided by the
            largest of them, in the same run where there is one.
    """

    row: str
    case: str
    measure: str
    unit: str
    bound: float
    reading: Reading = "at least"
    over: tuple[str, str] | None = None


_SPEED = {"measure": "tflops", "unit": "TFLOP/s"}
_RATIO = "tokens_per_second"

TARGETS = (
    Target(row="gradients against plain autograd, fp32", case="parity",
           measure="float32 eager.gradient", unit="", bound=1e-4, reading="at most"),
    Target(row="device update bitwise the host's", case="parity",
           measure="device_update_is_bitwise", unit="", bound=1),
    Target(row="8B, 32k tokens/step", case="8b-32k", bound=620, **_SPEED),
    Target(row="8B, 32k: of the 8192^3 matmul", case="8b-32k", measure="tflops", unit="",
           bound=0.79, over=("ceilings", "matmul_tflops")),
    Target(row="8B, 32k: of 8192^3 sustained", case="8b-32k", measure="tflops", unit="",
           bound=0.79, over=("ceilings", "matmul_sustained_tflops")),
    Target(row="8B, 32k: over compiled resident FSDP2", case="8b-32k", measure=_RATIO, unit="x",
           bound=1.5, over=("fsdp2-compiled", _RATIO)),
    Target(row="8B, 32k, packed: of one document a row", case="packed-8b-32k", measure=_RATIO,
           unit="x", bound=0.9, over=("8b-32k", _RATIO)),
    Target(row="8B, 128k tokens/step", case="8b-128k", bound=620, **_SPEED),
    Target(row="8B, 8k tokens/step", case="8b-8k", bound=500, **_SPEED),
    Target(row="4B, 32k tokens/step", case="4b-32k", bound=580, **_SPEED),
    Target(row="4B, 32k: over FSDP2 CPU offload", case="4b-32k", measure=_RATIO, unit="x",
           bound=2.5, over=("fsdp2-offload", _RATIO)),
    Target(row="4B, 32k: over ZeRO-Offload", case="4b-32k", measure=_RATIO, unit="x",
           bound=3.0, over=("zero", _RATIO)),
    Target(row="4B in 16 GiB of device memory", case="4b-32k-in-16gib", bound=420, **_SPEED),
    Target(row="4B in 16 GiB: memory reserved", case="4b-32k-in-16gib",
           measure="device_reserved_gib", unit="GiB", bound=16, reading="at most"),
    Target(row="14B, 64k tokens/step", case="14b-64k", bound=560, **_SPEED),
    Target(row="host update under DMA: over torch", case="host-update",
           measure="under_dma.ratio_to_torch", unit="x", bound=1.5),
    Target(row="host update under DMA: of DRAM", case="host-update",
           measure="under_dma.fraction_of_dram", unit="", bound=0.9),
    Target(row="start of 8B beyond reading the file", case="start",
           measure="beyond_reading_seconds", unit="s", bound=60, reading="at most"),
    Target(row="loss over 200 steps against FSDP2", case="loss200",
           measure="largest_difference", unit="", bound=5e-4, reading="at most"),
)  # fmt: skip
