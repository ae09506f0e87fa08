"""The training pages and recipes say what the program does."""

import json
import re
import runpy
from pathlib import Path

import pytest
import yaml

from headrace.trainer import resolve, train

ROOT = Path(__file__).parents[3]
RECIPES = sorted(p for p in (ROOT / "recipes").glob("*.yaml") if "output_dir" in p.read_text())
TRAINING = [p for p in RECIPES if "datasets" in yaml.safe_load(p.read_text())]


def test_the_tables_of_keys_are_the_configuration():
    generator = runpy.run_path(str(ROOT / "docs" / "generate_training.py"))
    page = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    assert page == generator["generate"](), "run: python docs/generate_training.py"


@pytest.mark.parametrize("recipe", TRAINING, ids=lambda p: p.name)
def test_recipes_resolve_without_a_note(recipe):
    _, notes = resolve(recipe)
    assert notes == []


def test_documented_overrides_resolve():
    text = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    found = re.findall(r"^headrace train (recipes/\S+)((?: \S+=\S+)+)$", text, flags=re.MULTILINE)
    assert found
    for recipe, overrides in found:
        resolve(ROOT / recipe, overrides.split())


def test_the_cpu_recipe_runs(tmp_path, tokenizer_dir, sentences):
    """With another corpus and tokenizer, and smaller; everything else as it stands."""
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in sentences * 4))
    result = train(
        ROOT / "recipes" / "tiny-cpu.yaml",
        [
            f"datasets=[{{path: {corpus}}}]", f"tokenizer_name_or_path={tokenizer_dir}",
            f"output_dir={tmp_path / 'run'}", f"data_cache_dir={tmp_path / 'cache'}",
            "model_config.num_hidden_layers=1", "model_config.hidden_size=32",
            "model_config.intermediate_size=32", "max_steps=3", "progress=none", "device=cpu",
        ],
    )  # fmt: skip
    assert result.status == "finished"
