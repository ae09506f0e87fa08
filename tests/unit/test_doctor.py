"""``headrace doctor``: each limit and fault it must notice, on made-up machines."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

import headrace.kernels
from headrace.cli.doctor import app
from headrace.doctor import examine as examine_module
from headrace.doctor import host
from headrace.doctor.findings import Finding, render, summary
from headrace.doctor.gpu import Card, check_cards, check_torch, check_transfers, list_cards
from headrace.doctor.kernels import check_kernels
from headrace.doctor.measure import Transfers
from headrace.doctor.versions import EXTRAS, FAULTS, REQUIRED, check_versions, release
from headrace.units import GIB

V4 = "avx avx2 bmi1 bmi2 f16c fma movbe avx512f avx512bw avx512cd avx512dq avx512vl"


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def one(findings, name):
    (found,) = [f for f in findings if f.name == name]
    return found


@pytest.mark.parametrize(
    ("flags", "level", "status"),
    [
        (V4, "x86-64-v4", "ok"),
        (V4.partition(" avx512f")[0], "x86-64-v3", "ok"),
        ("sse2 avx", "below x86-64-v3", "warning"),
    ],
)
def test_instruction_set_level(tmp_path, flags, level, status):
    write(tmp_path, {"proc/cpuinfo": f"model name : Chip\nflags : {flags}\n"})
    found = one(host.check_processor(tmp_path), "instruction set")
    assert found.value.startswith(level)
    assert found.status == status


MEMORY = {
    "proc/meminfo": "MemTotal: 67108864 kB\nMemAvailable: 33554432 kB\n",
    "proc/self/statm": "10 5 0 0 0 0 0\n",
}


def test_container_limit_is_shown_with_what_is_left(tmp_path):
    group = {"memory.max": str(16 * GIB), "memory.current": str(GIB)}
    files = {f"sys/fs/cgroup/{name}": text for name, text in group.items()}
    write(tmp_path, {**MEMORY, **files, "proc/self/cgroup": "0::/\n"})
    findings = host.check_memory(tmp_path)
    assert one(findings, "container limit").value == "16.00 GiB"
    assert one(findings, "host memory").value == "15.00 GiB available of 64.00 GiB"


def test_no_container_limit_is_not_reported_as_one(tmp_path):
    write(tmp_path, {**MEMORY, "proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max"})
    findings = host.check_memory(tmp_path)
    assert "container limit" not in {f.name for f in findings}
    assert one(findings, "host memory").value == "32.00 GiB available of 64.00 GiB"


def test_switched_off_huge_pages_and_overcommit_are_warnings_with_commands(tmp_path):
    write(
        tmp_path,
        {
            **MEMORY,
            "sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]",
            "proc/sys/vm/overcommit_memory": "2",
        },
    )
    findings = host.check_memory(tmp_path)
    for name in ("transparent huge pages", "overcommit"):
        found = one(findings, name)
        assert found.status == "warning"
        assert found.remedy.split()[0] in {"echo", "sudo"}


def test_small_shared_memory_is_a_warning(tmp_path, monkeypatch):
    write(tmp_path, {**MEMORY, "dev/shm/x": ""})
    monkeypatch.setattr(host.shutil, "disk_usage", lambda _: SimpleNamespace(free=64 << 20))
    found = one(host.check_memory(tmp_path), "/dev/shm")
    assert found.status == "warning"
    assert "--shm-size" in found.remedy


def test_numa_nodes_are_listed_with_their_memory(tmp_path):
    line = "Node {0} MemTotal: 1048576 kB\n"
    write(
        tmp_path,
        {f"sys/devices/system/node/node{i}/meminfo": line.format(i) for i in range(2)},
    )
    (found,) = host.check_numa(tmp_path)
    assert found.value == "node0 1.00 GiB, node1 1.00 GiB"
    assert "numactl" in found.remedy


def test_nearly_full_disk_is_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(host.shutil, "disk_usage", lambda _: SimpleNamespace(free=GIB))
    (found,) = host.check_disk(tmp_path)
    assert found.status == "warning"


SMI = "NVIDIA H200, 580.1, 143771, 1, 5, {width}, 16, 00000000:01:00.0\n"


@pytest.mark.parametrize(("width", "status"), [("16", "ok"), ("8", "warning")])
def test_card_in_a_narrow_slot_is_a_warning_but_idle_power_saving_is_not(width, status):
    cards = list_cards(lambda _: SMI.format(width=width))
    assert cards[0].memory_bytes == 143771 << 20
    assert one(check_cards(cards), "card 0 PCIe").status == status


@pytest.mark.parametrize("text", [None, "", "No devices were found\n", "a, b\n"])
def test_driver_without_cards(text):
    cards = list_cards(lambda _: text)
    assert cards == []
    assert one(check_cards(cards), "cards").status == "info"


def test_link_that_a_virtual_machine_hides_is_left_out():
    cards = list_cards(lambda _: "NVIDIA H200, 580.1, 143771, [N/A], [N/A], [N/A], [N/A], 0\n")
    assert [f.name for f in check_cards(cards)] == ["card 0"]


def card(name="NVIDIA H200"):
    return Card(
        name=name, driver="580", memory_bytes=GIB, link=(5, 16), link_max=(5, 16), bus_id="0"
    )


def torch_like(cuda, available):
    return SimpleNamespace(
        __version__="2.13.0",
        version=SimpleNamespace(cuda=cuda, hip=None),
        cuda=SimpleNamespace(is_available=lambda: available),
    )


@pytest.mark.parametrize(
    ("cards", "cuda", "available", "status"),
    [
        ([card()], "13.0", True, "ok"),
        ([card()], None, False, "fault"),
        ([card()], "13.0", False, "fault"),
        ([], "13.0", False, "info"),
        ([], None, False, "ok"),
    ],
)
def test_torch_that_cannot_use_the_card_is_a_fault(cards, cuda, available, status):
    (found,) = check_torch(cards, torch_like(cuda, available))
    assert found.status == status
    assert (found.remedy is not None) == (status == "fault")


def test_slow_transfers_and_absent_backends():
    rates = Transfers(h2d=6.0, d2h=20.0, duplex=5.0, attention={"cuDNN": 540.0, "Flash": None})
    findings = check_transfers(0, rates)
    assert one(findings, "card 0 transfers").status == "warning"
    assert one(findings, "card 0 attention, Flash").value == "does not run here"


GOOD = {
    **dict.fromkeys(REQUIRED, "2.13.0+cpu"),
    "transformers": "5.24.0",
}


@pytest.mark.parametrize(
    ("changed", "gpu", "faulty"),
    [
        ({}, (), set()),
        ({"torch": "2.10.1"}, (), {"torch"}),
        ({"torch": "2.11.0"}, (), set()),
        ({"transformers": "5.16.9"}, (), {"transformers"}),
        ({"transformers": "6.0.0"}, (), {"transformers"}),
        ({"triton": "3.7.0", "flash-linear-attention": "0.4"}, ("NVIDIA H200",), {"triton"}),
        ({"triton": "3.7.1", "flash-linear-attention": "0.4"}, ("NVIDIA H200",), set()),
        ({"triton": "3.3.1", "flash-linear-attention": "0.4"}, ("NVIDIA H200",), set()),
        ({"triton": "3.7.0", "flash-linear-attention": "0.4"}, ("NVIDIA A100",), set()),
        ({"triton": "3.7.0"}, ("NVIDIA H200",), set()),
    ],
)
def test_versions_with_known_faults(changed, gpu, faulty):
    findings = check_versions(gpu, {**GOOD, **changed}.get)
    assert {f.name for f in findings if f.status == "fault"} == faulty
    assert all(f.remedy for f in findings if f.status == "fault")


def test_missing_required_package_is_a_fault_and_missing_extra_is_not():
    without = {name: version for name, version in GOOD.items() if name != "polars"}
    findings = check_versions((), without.get)
    assert one(findings, "polars").status == "fault"
    extra = one(findings, "lora")
    assert extra.status == "missing"
    assert extra.remedy == "pip install 'headrace[lora]'"


def test_doctor_knows_every_dependency_and_extra_of_the_project():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]

    def names(requirements):
        return {re.split(r"[<>=\[]", entry)[0] for entry in requirements}

    assert set(REQUIRED) == names(project["dependencies"])
    extras = project["optional-dependencies"]
    assert {extra: set(needed) for extra, (needed, _) in EXTRAS.items()} == {
        extra: names(listed) for extra, listed in extras.items() if extra != "dev"
    }


def test_local_and_development_versions_are_read():
    assert release("2.13.0+cpu") == (2, 13, 0)
    assert release("3.7.0.post1") == (3, 7, 0)
    assert all(release(fault.low) for fault in FAULTS)


def test_absent_kernels_are_a_warning_with_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "headrace.kernels.native", None)
    monkeypatch.delattr(headrace.kernels, "native", raising=False)
    found = one(check_kernels(), "host update")
    assert found.status == "warning"
    assert "install" in found.remedy


def test_spinning_pools_are_a_warning(monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert one(check_kernels(), "OMP_WAIT_POLICY").status == "warning"


def test_summary_and_text():
    fine = Finding(area="a", name="x", status="ok", value="1")
    lacking = Finding(area="a", name="y", status="missing", value="2", remedy="pip install y")
    broken = Finding(area="b", name="z", status="fault", value="3", detail="why")
    assert summary([fine, lacking]) == "ok"
    assert summary([fine, broken]) == "faults"
    text = render([fine, lacking, broken])
    assert "-> pip install y" in text
    assert "FAULT    z: 3  (why)" in text


def test_json_and_exit_code_of_a_faulty_machine(monkeypatch):
    broken = Finding(area="a", name="x", status="fault", value="1")
    monkeypatch.setattr(examine_module, "examine", lambda **_: [broken])
    done = CliRunner().invoke(app, ["--json"])
    assert done.exit_code == 1
    out = json.loads(done.stdout)
    assert (out["status"], out["findings"][0]["name"]) == ("faults", "x")


def test_this_machine_can_be_examined():
    done = CliRunner().invoke(app, ["--json", "--no-measure"])
    out = json.loads(done.stdout)
    areas = {finding["area"] for finding in out["findings"]}
    assert {"processor", "kernels", "memory", "disk", "GPU", "packages"} <= areas


def test_a_mistyped_model_is_answered_at_once_and_without_a_network(monkeypatch, tmp_path):
    """No retries against a hub, no torch; the nearest names of what is known and what is cached."""
    cached = tmp_path / "hub" / "models--somebody--pretty-7B"
    cached.mkdir(parents=True)
    code = (
        "import socket, sys\n"
        "def refused(*a, **k): raise AssertionError('the network')\n"
        "socket.getaddrinfo = socket.socket.connect = refused\n"
        "from headrace.cli import main\n"
        "try: main(['doctor', '--model', sys.argv[1]])\n"
        "finally: assert not {'torch', 'transformers'} & set(sys.modules), 'imported'\n"
    )
    near = {
        "Qwen/Qwen3-8B-bse": "did you mean Qwen/Qwen3-8B-Base",
        "somebody/prety-7B": "or did you mean somebody/pretty-7B?",
        "nope": "hf download nope config.json",
        "Qwen/Qwen3-8B": "hf download Qwen/Qwen3-8B config.json",
    }
    for name, message in near.items():
        done = subprocess.run(
            [sys.executable, "-c", code, name],
            capture_output=True, text=True, check=False,
            env={**os.environ, "HF_HUB_CACHE": str(tmp_path / "hub")},
        )  # fmt: skip
        assert done.returncode == 2, done.stderr
        assert message in done.stderr
        assert ("did you mean" in done.stderr) == ("did you mean" in message)
        assert "neither a folder nor in the local hub cache" in done.stderr
