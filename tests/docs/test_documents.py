"""Documents run: commands, links, help pages and pins say what the project does."""

from __future__ import annotations

import ast
import importlib
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from headrace.cli import VERBS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
GENERATOR = runpy.run_path(str(ROOT / "docs" / "generate_cli.py"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def blocks(page: Path, language: str) -> list[str]:
    text = page.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def marked(name: str) -> str:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (found,) = re.findall(
        rf"^<!-- command: {name} -->\n```bash\n(.*?)\n```$", text, flags=re.MULTILINE | re.DOTALL
    )
    return found


def headrace_commands() -> list[tuple[str, list[str]]]:
    found = []
    for page in PAGES:
        for block in blocks(page, "bash"):
            for line in block.replace("\\\n", " ").splitlines():
                for command in re.split(r"&&|;|\|", line):
                    words = shlex.split(command, comments=True)
                    if words and Path(words[0]).name == "headrace":
                        found.append((page.name, words[1:]))
    return found


COMMANDS = headrace_commands()
CHEAP = [(page, words) for page, words in COMMANDS if words[:1] in (["plan"], ["--version"])]


def normalised(name: str) -> str:
    return re.split(r"[\[<>=!~; ]", name, maxsplit=1)[0].lower().replace("_", "-")


def pins(path: Path) -> dict[str, str]:
    found = re.findall(r"^([A-Za-z0-9_.-]+)==([^\s\\]+)", path.read_text(), flags=re.MULTILINE)
    return {normalised(name): version for name, version in found}


def test_readme_has_one_command_for_the_product_and_one_for_the_tests():
    for name, extra in (("quickstart", "quickstart"), ("test", "dev")):
        command = marked(name)
        assert "\n" not in command
        assert command.startswith("python3 -m venv .venv && .venv/bin/pip install -c constraints")
        assert f".[{extra}]" in command
        assert extra in PROJECT["optional-dependencies"]
    assert marked("quickstart").endswith("&& .venv/bin/headrace quickstart")
    assert ".venv/bin/python -m pytest" in marked("test")


def test_ci_runs_the_readmes_test_command():
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o100
    extraction = re.search(r"^test_command=\$\((.*)\)$", script.read_text(), flags=re.MULTILINE)
    assert extraction is not None
    done = subprocess.run(
        ["bash", "-c", extraction[1]], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == marked("test")


@pytest.mark.parametrize(("page", "words"), COMMANDS, ids=lambda x: str(x)[:60])
def test_documented_command_has_a_verb_or_option_that_does_not_exist(page, words):
    if words[:1] in ([], ["--help"], ["--version"], ["VERB"]):
        return
    assert words[0] in VERBS, page
    text = GENERATOR["help_text"](words[:1])
    nested = GENERATOR["subcommands"](text)
    if nested and len(words) > 1 and not words[1].startswith("-"):
        assert words[1] in nested, page
        text = GENERATOR["help_text"](words[:2])
    for word in words[1:]:
        if word.startswith("--"):
            assert re.search(rf"(?<![\w-]){re.escape(word.partition('=')[0])}(?![\w-])", text), word


@pytest.mark.parametrize(("page", "words"), CHEAP, ids=lambda x: str(x)[:60])
def test_documented_command_fails(page, words, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "headrace", *words],
        cwd=ROOT if any((ROOT / word).exists() for word in words) else tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in {0, 3}, f"{page}: {done.stderr}"


def test_help_pages_differ_from_the_program():
    current = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert current == GENERATOR["generate"](), "run: python docs/generate_cli.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_link_to_a_file_that_is_not_there(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        if not target.startswith(("http://", "https://", "mailto:")):
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_python_example_imports_what_does_not_exist(page):
    for block in blocks(page, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("headrace"):
                module = importlib.import_module(node.module)
                for alias in node.names:
                    assert hasattr(module, alias.name), f"{node.module}.{alias.name}"


def test_every_page_of_docs_is_reached_from_its_index():
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "index.md" or f"({page.name})" in index, page.name


def test_constraints_pin_every_dependency_and_agree_with_the_lock():
    pinned = pins(ROOT / "constraints.txt")
    wanted = [*PROJECT["dependencies"]]
    for extra in PROJECT["optional-dependencies"].values():
        wanted += [name for name in extra if not name.startswith("headrace[")]
    missing = {normalised(name) for name in wanted} - set(pinned)
    assert not missing
    locked = pins(ROOT / "requirements-ci.txt")
    for path in ("torch-cpu.txt", "torch-cuda.txt"):
        locked |= pins(ROOT / ".ci" / path)
    assert {name: v for name, v in locked.items() if pinned.get(name) != v} == {}


def test_lock_holds_no_address_of_a_server():
    for path in [ROOT / "constraints.txt", ROOT / "requirements-ci.txt", *ROOT.glob(".ci/*")]:
        assert not re.search(r"https?://|--(extra-)?index-url|--find-links", path.read_text())
