"""Every command of the documents runs, on small data under the names that the documents use.

A command is run as it stands, with options added where it would take minutes (``SMALLER``), or
has a reason why it is not run here (``NOT_RUN``). Commands of a page run in their order, in one
folder that holds what the page presumes.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import runpy
import shlex
import shutil
import socket
import subprocess
import sys
import warnings
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
import yaml

from headrace.cli import main
from sharded import SHAPES, save_sharded

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
GOES_ON = (
    "max_steps=2 max_length=64 model_config.num_hidden_layers=1 model_config.hidden_size=32 "
    "model_config.intermediate_size=32 model_config.head_dim=16 model_config.num_attention_heads=2 "
    "model_config.num_key_value_heads=1 device=cpu progress=none"
)
TINY_TRAIN = f"{GOES_ON} overwrite_output_dir=true resume_from_checkpoint=false"
FEW_DRAWS = "--shifts 19 --no-tables"
# What is added to a command, by pattern; the first that fits.
SMALLER = {
    "headrace corpus build recipes/corpus-local.yaml": (
        "sources.0.path=changelogs sampling.max_tokens=60000 tokenizer.vocab_size=384"
    ),
    "headrace train recipes/*.yaml*--dry-run": "",
    "headrace train recipes/tiny-cpu.yaml resume_from_checkpoint=auto": GOES_ON,
    "headrace train recipes/tiny-cpu.yaml*": TINY_TRAIN,
    "headrace tune recipes/tiny-cpu.yaml*": TINY_TRAIN,
    "torchrun * headrace train recipes/tiny-cpu.yaml*": TINY_TRAIN,
    "headrace train recipes/*.yaml model_name_or_path=models/tiny *": (
        "max_length=64 excess_length=split max_steps=1 device=cpu progress=none"
    ),
    "headrace train published.yaml*base_model*": "max_steps=2 device=cpu progress=none",
    "headrace audit --panel *": FEW_DRAWS,
    "headrace audit recipes/jpx.yaml*": FEW_DRAWS,
}
# Why a command is not run here, by pattern.
NOT_RUN = {
    "python3 -m venv *": "it needs the network; .ci/run runs it",
    ".venv/bin/*": "it is what .ci/run runs",
    "pip *": "it needs the network",
    "pip-compile *": "it needs the network",
    "python -m zipfile *": "it unpacks what pip downloads",
    "headrace quickstart*": "it takes eight minutes; test_quickstart.py runs it smaller",
    "headrace corpus build recipes/corpus-fineweb.yaml*": "it needs a download of FineWeb",
    "headrace embed * --device cuda *": "it needs a GPU",
    "python benchmarks/*": "it measures for minutes; what it prints is in performance.md",
}
# What an earlier command of the page has left, and a command wants to make.
FRESH = ["models/merged", "out/continued", "out/tiny-cpu-model"]


def commands(page):
    """The commands of a page's bash blocks, one string each, as a shell would be given them."""
    text = page.read_text(encoding="utf-8")
    for block in re.findall(r"^```bash\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            for command in re.split(r"&&", line.partition(" #")[0]):
                if words := command.strip():
                    yield re.sub(r"\s+", " ", words)


COMMANDS = [(page.name, command) for page in PAGES for command in commands(page)]
RUN = [pair for pair in COMMANDS if not any(fnmatch(pair[1], reason) for reason in NOT_RUN)]


def call(command):
    """Run a command in this process; returns its exit code."""
    words = shlex.split(command.partition(">")[0])
    if words[0] == "torchrun":
        run = [sys.executable, "-m", "torch.distributed.run", *words[1:]]
        return subprocess.run(run, check=False, timeout=240).returncode
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        try:
            main(words[1:])
        except SystemExit as ended:
            return ended.code or 0
    return 0


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A folder with recipes, a corpus, a run, a model, a panel and sharded files."""
    folder = tmp_path_factory.mktemp("docs")
    before = Path.cwd()
    os.chdir(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADRACE_CACHE", str(folder / "cache"))
        try:
            _fill(folder)
            yield folder
        finally:
            os.chdir(before)


def _fill(folder):
    (folder / "recipes").symlink_to(ROOT / "recipes")
    _changelogs(folder / "changelogs")
    build = "headrace corpus build recipes/corpus-local.yaml"
    assert call(f"{build} {SMALLER[build]}") == 0
    assert call(f"headrace train recipes/tiny-cpu.yaml {TINY_TRAIN}") == 0
    assert call("headrace export out/tiny-cpu FOLDER") == 0
    shutil.copytree("FOLDER", "models/tiny")
    Path("CORPUS").symlink_to(folder / "out/corpus-local/2016")
    Path("corpora").mkdir()
    Path("corpora/2017").symlink_to(folder / "out/corpus-local/2016")
    for name in ("base", "cut", "full", "lora"):
        shutil.copytree("out/tiny-cpu", f"runs/{name}")
    _panel()
    rows = [{"instruction": f"Add {n}.", "input": "", "output": str(n)} for n in range(20)]
    Path("alpaca.json").write_text(json.dumps(rows))
    talk = [{"role": "user", "content": "Add."}, {"role": "assistant", "content": "Added."}]
    Path("talks.jsonl").write_text((json.dumps({"messages": talk}) + "\n") * 60)
    published = {
        "base_model": "somebody/base", "datasets": [{"path": "alpaca.json", "type": "alpaca"}],
        "sequence_len": 256, "micro_batch_size": 2, "num_epochs": 1, "learning_rate": 1e-5,
        "val_set_size": 0.1, "deepspeed": "zero3.json", "output_dir": "out/published",
    }  # fmt: skip
    Path("published.yaml").write_text(yaml.safe_dump(published))
    _sharded(folder)


def _changelogs(folder):
    entry = (
        "mill ({n}) unstable; urgency=low\n\n  * Mend the race and the wheel, part {n}: what the "
        "flood of that year\n    had carried off was found below the weir.\n\n"
        " -- A Miller <miller@example.org>  {day:02d} {month} {year} 12:00:00 +0000\n\n"
    )
    text = "".join(
        entry.format(n=f"1.{n}", day=1 + n % 27, month=("Jan", "May", "Oct")[n % 3], year=year)
        for n, year in enumerate(sorted(list(range(1996, 2017)) * 4, reverse=True))
    )
    # The trailer of an entry begins with the day of the week.
    text = re.sub(
        r">  (\d\d \w+ \d{4})",
        lambda m: f">  {np.datetime64(_iso(m[1])).astype(object):%a}, {m[1]}",
        text,
    )
    (folder / "mill").mkdir(parents=True)
    with gzip.open(folder / "mill" / "changelog.Debian.gz", "wt") as file:
        file.write(text)


def _iso(text):
    day, month, year = text.split()
    return f"{year}-{ {'Jan': '01', 'May': '05', 'Oct': '10'}[month] }-{day}"


def _panel():
    rng = np.random.default_rng(0)
    days = np.arange(np.datetime64("2024-01-01"), np.datetime64("2024-12-31"))
    days = days[np.is_busday(days)]
    entities = [f"E{n}" for n in range(12)]
    rows = [(entity, day) for entity in entities for day in days[::3]]
    frame = pl.DataFrame(
        {
            "entity": [entity for entity, _ in rows],
            "date": np.array([day for _, day in rows], "datetime64[D]"),
        }
    ).with_columns(
        label_start=pl.col("date") + pl.duration(days=1),
        label_end=pl.col("date") + pl.duration(days=2),
        y=pl.Series(rng.normal(size=len(rows))),
    )
    frame.write_parquet("PANEL.parquet")
    np.save("base.npy", rng.normal(size=(len(rows), 8)).astype(np.float32))


def _sharded(folder):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(save_sharded, args=(2, port, folder / "sharded"), nprocs=2)
    shutil.move("sharded/qwen3", "outputs")
    shutil.move("outputs/checkpoint-2", "outputs/checkpoint-500")
    Path("models/Qwen3-8B").mkdir(parents=True)
    for place in ("outputs", "outputs/checkpoint-500"):
        if (found := Path(place) / "config.json").is_file():
            shutil.copy(found, "models/Qwen3-8B")
    Path("rows.jsonl").write_text(
        "".join(json.dumps({"input_ids": list(range(n, n + 9))}) + "\n" for n in range(40))
    )
    config = {
        "model_config": {
            "model_type": "qwen3", **SHAPES, "head_dim": 16, "tie_word_embeddings": True,
        },
        "datasets": [{"path": "rows.jsonl", "type": "tokens"}],
        "output_dir": "out/elsewhere", "max_steps": 3, "max_length": 32, "progress": "none",
        "device": "cpu",
    }  # fmt: skip
    Path("config.yaml").write_text(yaml.safe_dump(config))


@pytest.mark.parametrize(
    ("page", "command"), RUN, ids=[f"{page}-{command[:70]}" for page, command in RUN]
)
def test_a_documented_command_runs(world, page, command, capfd):
    for path in FRESH:
        words = shlex.split(command)
        if path in words and words.index(path) > 2:
            shutil.rmtree(world / path, ignore_errors=True)
    added = next((more for pattern, more in SMALLER.items() if fnmatch(command, pattern)), "")
    assert command.startswith(("headrace ", "torchrun ")), (
        f"{page}: no rule says how to run {command!r}"
    )
    code = call(f"{command.partition('>')[0]} {added}")
    allowed = {0, 3} if command.startswith("headrace plan") else {0}
    assert code in allowed, f"{page}: {command}\n{capfd.readouterr().err[-2000:]}"


@pytest.mark.parametrize("pattern", [*NOT_RUN, *SMALLER])
def test_a_rule_fits_some_command(pattern):
    assert any(fnmatch(command, pattern) for _, command in COMMANDS), pattern


@pytest.mark.parametrize("page", ["training.md", "evaluation.md"])
def test_examples_of_python_run(world, page):
    """The example of a page, with its names."""
    if not Path("models/Qwen3-0.6B").exists():
        shutil.copytree("FOLDER", "models/Qwen3-0.6B")
        (world / "corpora/news").mkdir()
        (world / "corpora/news/2016").symlink_to(world / "out/corpus-local/2016")
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    code = code.replace('"max_length": 2048', '"max_length": 64, "max_steps": 1, "device": "cpu"')
    file = world / "example.py"
    file.write_text(code)
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        assert runpy.run_path(str(file))["result"].status == "finished"
    assert "headrace" in sys.modules
