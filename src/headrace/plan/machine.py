"""What a run has to live on: cards, host memory, links, rates, each marked with its origin.

A rate is *measured*, from a *data sheet*, *derived* from one by the share of it that a measured
card reached, *given* by the user, *detected* on this machine, or *assumed*. The table of cards is
``cards.json``. Nothing here measures: ``headrace tune`` and ``headrace bench`` do.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
import shutil
import subprocess
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.errors import ConfigError
from headrace.units import GIB

if TYPE_CHECKING:
    from collections.abc import Mapping

# What the measured H200 reached of its data sheet (cards.json, "measured"): 783 of 989 TFLOP/s,
# 49.3 in and 55.2 out of 63 GB/s, 40 each way when both directions run.
MATMUL_SHARE, H2D_SHARE, D2H_SHARE, DUPLEX_SHARE = 0.79, 0.78, 0.88, 0.63

# Host AdamW on the split master while transfers run, 13 threads of a 16-core Xeon with AVX-512:
# 4.9 Gparam/s. The update is bound by memory bandwidth, so more cores are not credited.
UPDATE_GPARAMS_16_CORES = 4.9
# Left out of the name of a card that a user or a driver gives.
_MAKERS = frozenset({"nvidia", "geforce", "amd", "instinct"})
_SLOWEST = 1e-6  # 10^9 parameters a second: a thousand parameters

# fp32 matmul a core, for planning on a machine without a GPU: order of magnitude only.
CPU_TFLOPS_PER_CORE = 0.05


@dataclass(frozen=True, kw_only=True)
class Rate:
    """A figure and where it comes from."""

    value: float
    origin: str


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Cards and host of one node.

    Attributes:
        gpu: short name of the card, ``"cpu"`` without one.
        title: its full name.
        num_gpus: cards used; 1 on a machine without a GPU.
        memory_bytes: of one card.
        peak_tflops: dense bf16, None where no data sheet says.
        matmul_tflops: bf16 matmul that a card reaches (fp32 on a CPU).
        h2d, d2h: host to device and back alone, GB/s.
        duplex: each way while both run, GB/s.
        nvlink: between cards, one way, GB/s; the PCIe rate where there is no such link.
        host_bytes: memory of the host, None where it is not known.
        disk_bytes: free disk, None where it is not known.
        update: host optimizer, 10^9 parameters a second.
        cores: host cores, None where they are not known.
    """

    gpu: str
    title: str
    num_gpus: int
    memory_bytes: Rate
    peak_tflops: Rate | None
    matmul_tflops: Rate
    h2d: Rate
    d2h: Rate
    duplex: Rate
    nvlink: Rate
    host_bytes: Rate | None
    disk_bytes: Rate | None
    update: Rate
    cores: int | None

    @property
    def is_cpu(self) -> bool:
        """No GPU: the device is the host itself."""
        return self.gpu == "cpu"

    @property
    def rates(self) -> dict[str, Rate]:
        """What speed rests on, by name with its unit."""
        found = {
            "matmul TFLOP/s": self.matmul_tflops,
            "H2D GB/s": self.h2d,
            "both ways GB/s": self.duplex,
            "host update Gparam/s": self.update,
        }
        return found if self.num_gpus == 1 else {**found, "between cards GB/s": self.nvlink}


def with_measured(machine: Machine, figures: Mapping[str, float]) -> Machine:
    """A machine at rates that ``headrace tune`` measured on it; a rate that was given stays.

    Args:
        machine: the same one, as its table or its cores describe it.
        figures: of the tune file, by name with its unit.

    Raises:
        KeyError: one is missing.
    """

    def rate(name: str, share: float = 1.0) -> Rate:
        return Rate(value=figures[name] * share, origin="measured")

    # Measured under the load of a step; a CPU's copies read and write its memory.
    loaded = "" if machine.is_cpu else "_loaded"
    to = rate("memory_gbps", 0.5) if machine.is_cpu else rate("h2d_loaded_gbps")
    back = to if machine.is_cpu else rate("d2h_loaded_gbps")
    given = machine.update.origin == "given"
    return replace(
        machine,
        matmul_tflops=rate("products_tflops"),
        h2d=to,
        d2h=back,
        duplex=min(to, back, key=lambda one: one.value),
        update=machine.update if given else rate(f"update{loaded}_gparameters"),
    )


def _table() -> dict[str, Any]:
    text = resources.files("headrace.plan").joinpath("cards.json").read_text(encoding="utf-8")
    table: dict[str, Any] = json.loads(text)
    return table


def card_names() -> list[str]:
    """Names that ``--gpu`` takes."""
    return list(_table()["cards"])


def _short(name: str) -> str:
    """``nvidia geforce rtx 4090`` as the table has it: without maker and series, with dashes."""
    words = re.split(r"[\s_]+", name)
    return "-".join(word for word in words if word not in _MAKERS)


def find_card(name: str) -> tuple[str, dict[str, Any]]:
    """A card of the table by its name or alias.

    Raises:
        ConfigError: no such card; names the nearest.
    """
    cards = _table()["cards"]
    wanted = name.strip().lower()
    names = {alias: key for key, card in cards.items() for alias in (key, *card["aliases"])}
    for spelling in (wanted, _short(wanted)):
        if spelling in names:
            return names[spelling], cards[names[spelling]]
    # Without its maker's name a card's number is what tells it from others.
    short = _short(wanted)
    near = [alias for alias in names if f"-{alias}-" in f"-{short}-"]
    near = near or difflib.get_close_matches(short, names, n=1)
    hint = f" (nearest: {names[near[0]]})" if near else ""
    raise ConfigError(
        f"no card {name!r} in the table{hint}", remedy=f"known cards: {', '.join(cards)}"
    )


def _rate(card: dict[str, Any], key: str) -> Rate | None:
    pair = card.get(key)
    return None if pair is None else Rate(value=float(pair[0]), origin=str(pair[1]))


def _update_rate(cores: int | None, given: float | None) -> Rate:
    if given is not None:
        if not _SLOWEST <= given < math.inf:
            raise ConfigError(
                f"the host updates {given:g} * 10^9 parameters a second as given; it must be a "
                f"number from {_SLOWEST:g} on",
                remedy="what 'headrace bench' prints, or leave --update-rate out",
            )
        return Rate(value=given, origin="given")
    if cores is None:
        return Rate(value=UPDATE_GPARAMS_16_CORES, origin="assumed")
    share = min(cores, 16) / 16
    return Rate(value=UPDATE_GPARAMS_16_CORES * share, origin="assumed")


def describe_machine(
    *,
    gpu: str,
    num_gpus: int,
    host_bytes: Rate | None,
    disk_bytes: Rate | None = None,
    cores: int | None = None,
    update_gparams: float | None = None,
    card_memory: Rate | None = None,
) -> Machine:
    """A machine with cards of the table.

    Args:
        gpu: name of a card.
        num_gpus: how many.
        host_bytes: host memory; None leaves it open.
        disk_bytes: free disk; None leaves it open.
        cores: host cores; None leaves them open.
        update_gparams: host update rate, 10^9 parameters a second, if it was measured.
        card_memory: bytes of a card in place of the table's.

    Raises:
        ConfigError: the card is not in the table, or the number of cards or the update rate is
            not positive.
    """
    if num_gpus < 1:
        raise ConfigError(
            f"--gpus is {num_gpus}; at least one card is needed", remedy="--gpus 1, or leave it out"
        )
    key, card = find_card(gpu)
    peak, pcie, memory = (_rate(card, k) for k in ("peak_tflops", "pcie_gb_per_s", "memory_gib"))
    assert peak is not None
    assert pcie is not None
    assert memory is not None

    def reached(name: str, base: Rate, share: float) -> Rate:
        return _rate(card, name) or Rate(value=base.value * share, origin="derived")

    return Machine(
        gpu=key,
        title=card["title"],
        num_gpus=num_gpus,
        memory_bytes=card_memory or Rate(value=memory.value * GIB, origin=memory.origin),
        peak_tflops=peak,
        matmul_tflops=reached("matmul_tflops", peak, MATMUL_SHARE),
        h2d=reached("h2d_gb_per_s", pcie, H2D_SHARE),
        d2h=reached("d2h_gb_per_s", pcie, D2H_SHARE),
        duplex=reached("duplex_gb_per_s", pcie, DUPLEX_SHARE),
        nvlink=_rate(card, "nvlink_gb_per_s") or pcie,
        host_bytes=host_bytes,
        disk_bytes=disk_bytes,
        update=_update_rate(cores, update_gparams),
        cores=cores,
    )


def describe_cpu(
    *, host_bytes: Rate, disk_bytes: Rate | None, cores: int, update_gparams: float | None
) -> Machine:
    """A machine without a GPU: slots and activations live in host memory too."""
    copy = Rate(value=10.0, origin="assumed")
    return Machine(
        gpu="cpu",
        title=f"CPU, {cores} cores",
        num_gpus=1,
        memory_bytes=host_bytes,
        peak_tflops=None,
        matmul_tflops=Rate(value=CPU_TFLOPS_PER_CORE * cores, origin="assumed"),
        h2d=copy,
        d2h=copy,
        duplex=copy,
        nvlink=copy,
        host_bytes=host_bytes,
        disk_bytes=disk_bytes,
        update=_update_rate(cores, update_gparams),
        cores=cores,
    )


def _nvidia_cards() -> list[tuple[str, int]]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = [tool, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        # A fixed command line of the driver's own tool.
        done = subprocess.run(  # noqa: S603
            query, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    cards = []
    for line in done.stdout.splitlines():
        name, _, mebibytes = line.rpartition(",")
        if name and mebibytes.strip().isdigit():
            cards.append((name.strip(), int(mebibytes) << 20))
    return cards


def detect_machine(
    *, host_bytes: Rate, update_gparams: float | None = None, on_cpu: bool = False
) -> Machine:
    """This machine: its NVIDIA cards if the driver lists any, disk and cores.

    Args:
        host_bytes: memory that a process may use; the caller knows the container's limits.
        update_gparams: host update rate, 10^9 parameters a second, if it was measured.
        on_cpu: its cards are not to be used.

    Raises:
        ConfigError: there is a card, but not in the table of rates.
    """
    cores = len(os.sched_getaffinity(0))
    disk = Rate(value=float(shutil.disk_usage(Path.cwd()).free), origin="detected")
    cards = [] if on_cpu else _nvidia_cards()
    if not cards:
        return describe_cpu(
            host_bytes=host_bytes, disk_bytes=disk, cores=cores, update_gparams=update_gparams
        )
    name, card_bytes = cards[0]
    return describe_machine(
        gpu=name,
        num_gpus=len(cards),
        host_bytes=host_bytes,
        disk_bytes=disk,
        cores=cores,
        update_gparams=update_gparams,
        card_memory=Rate(value=float(card_bytes), origin="detected"),
    )
