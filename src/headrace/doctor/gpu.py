"""NVIDIA cards: driver, memory, PCIe link, NUMA node, and whether torch can use them."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from headrace.doctor.findings import Finding, Status
from headrace.units import format_bytes

if TYPE_CHECKING:
    from headrace.doctor.measure import Transfers

Query = Callable[[list[str]], str | None]

_FIELDS = (
    "name,driver_version,memory.total,pcie.link.gen.current,pcie.link.gen.max,"
    "pcie.link.width.current,pcie.link.width.max,pci.bus_id"
)


@dataclass(frozen=True, kw_only=True)
class Card:
    """What the driver says of one card; links are (generation, width)."""

    name: str
    driver: str
    memory_bytes: int
    link: tuple[int, int] | None
    link_max: tuple[int, int] | None
    bus_id: str


def run_nvidia_smi(arguments: list[str]) -> str | None:
    """Output of the driver's own tool, None where it is absent or fails."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    try:
        # The arguments are constants of this module.
        done = subprocess.run(  # noqa: S603
            [tool, *arguments], capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def _pair(generation: str, width: str) -> tuple[int, int] | None:
    return (int(generation), int(width)) if generation.isdigit() and width.isdigit() else None


def list_cards(query: Query = run_nvidia_smi) -> list[Card]:
    """The cards that the driver lists."""
    text = query([f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits"])
    cards = []
    for line in (text or "").splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) != len(_FIELDS.split(",")) or not parts[2].isdigit():
            continue
        cards.append(
            Card(
                name=parts[0],
                driver=parts[1],
                memory_bytes=int(parts[2]) << 20,
                link=_pair(parts[3], parts[5]),
                link_max=_pair(parts[4], parts[6]),
                bus_id=parts[7],
            )
        )
    return cards


def check_cards(cards: list[Card]) -> list[Finding]:
    """Each card with its link; a link below its maximum is a warning."""
    if not cards:
        return [
            Finding(
                area="GPU",
                name="cards",
                status="info",
                value="none that the NVIDIA driver lists",
                detail="training runs on the CPU, which suits small models only",
            )
        ]
    findings = []
    for index, card in enumerate(cards):
        findings.append(
            Finding(
                area="GPU",
                name=f"card {index}",
                status="ok",
                value=f"{card.name}, {format_bytes(card.memory_bytes)}, driver {card.driver}",
            )
        )
        if card.link is None or card.link_max is None:
            continue
        # An idle card may lower its generation to save power, never its width.
        narrow = card.link[1] < card.link_max[1]
        idle = card.link[0] < card.link_max[0]
        findings.append(
            Finding(
                area="GPU",
                name=f"card {index} PCIe",
                status="warning" if narrow else "ok",
                value=f"generation {card.link[0]} x{card.link[1]} "
                f"(at most {card.link_max[0]} x{card.link_max[1]})",
                detail="fewer lanes than the card has: streaming is slower by that factor"
                if narrow
                else "generation is lowered while idle"
                if idle
                else "",
                remedy="move the card to a full-width slot" if narrow else None,
            )
        )
    return findings


def check_torch(cards: list[Card], torch: Any = None) -> list[Finding]:
    """Whether the installed torch sees the cards.

    Args:
        cards: what the driver lists.
        torch: the module; imported here when it is not given.
    """
    if torch is None:
        try:
            torch = import_module("torch")
        except (ImportError, OSError) as error:
            return [
                Finding(
                    area="GPU",
                    name="torch",
                    status="fault",
                    value=f"cannot be imported: {error}",
                    remedy="pip install --force-reinstall torch",
                )
            ]
    built = torch.version.cuda or torch.version.hip
    usable = bool(torch.cuda.is_available())
    status: Status = "ok"
    detail, remedy = "", None
    if cards and not built:
        status = "fault"
        detail = "this torch was built without CUDA, so the cards stay unused"
        remedy = "pip install --force-reinstall torch, from an index of CUDA builds"
    elif cards and not usable:
        status = "fault"
        detail = "the driver is too old for this build of torch, or CUDA_VISIBLE_DEVICES hides them"
        remedy = "nvidia-smi shows the driver's CUDA version; install a torch built for it"
    elif built and not cards:
        status = "info"
        detail = "a CUDA build without a card: larger than needed, works on the CPU"
    value = f"{torch.__version__}, {f'CUDA {built}' if built else 'CPU build'}"
    return [
        Finding(area="GPU", name="torch", status=status, value=value, detail=detail, remedy=remedy)
    ]


def check_transfers(index: int, rates: Transfers) -> list[Finding]:
    """Measured transfer and attention rates of one card as findings."""
    # Below this share of a PCIe 4 link a card in a full slot is held up by something.
    slow = min(rates.h2d, rates.d2h) < 12
    findings = [
        Finding(
            area="GPU",
            name=f"card {index} transfers",
            status="warning" if slow else "ok",
            value=f"H2D {rates.h2d:.1f}, D2H {rates.d2h:.1f}, both at once {rates.duplex:.1f} "
            "GB/s each way (pinned)",
            detail="slower than a full PCIe 4 link; look at the slot, IOMMU and NUMA binding"
            if slow
            else "",
        )
    ]
    for backend, tflops in rates.attention.items():
        findings.append(
            Finding(
                area="GPU",
                name=f"card {index} attention, {backend}",
                status="info" if tflops is None else "ok",
                value="does not run here" if tflops is None else f"{tflops:.0f} TFLOP/s",
                detail="causal, 8k tokens, forward and backward",
            )
        )
    return findings
