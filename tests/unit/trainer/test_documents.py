"""The training pages and recipes say what the program does."""

import json
import re
import runpy
from pathlib import Path

import pytest
import yaml

from headrace.cli import main
from headrace.data.sources import DatasetSource
from headrace.plan.architecture import read_architecture
from headrace.trainer import resolve, train

ROOT = Path(__file__).parents[3]
RECIPES = sorted(p for p in (ROOT / "recipes").glob("*.yaml") if "output_dir" in p.read_text())
TINY = ROOT / "recipes" / "tiny-cpu.yaml"
TRAINING = [
    p for p in RECIPES if p.stem != "tiny-cpu" and "datasets" in yaml.safe_load(p.read_text())
]


def test_the_tables_of_keys_are_the_configuration():
    generator = runpy.run_path(str(ROOT / "docs" / "generate_training.py"))
    page = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    assert page == generator["generate"](), "run: python docs/generate_training.py"
    schema = (ROOT / "docs" / "headrace.schema.json").read_text(encoding="utf-8")
    assert schema == generator["schema_text"](), "run: python docs/generate_training.py"


def test_every_row_of_the_tables_of_keys_is_one_line():
    generator = runpy.run_path(str(ROOT / "docs" / "generate_training.py"))
    rows = [*generator["training_rows"](), *generator["engine_rows"]()]
    assert [key for key, *cells in rows if "\n" in "".join(cells)] == []
    properties = json.loads(generator["schema_text"]())["properties"]
    broken = [key for key, entry in properties.items() if "\n" in entry.get("description", "")]
    assert broken == []


def test_the_data_page_names_every_key_of_a_dataset():
    page = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    missing = [name for name in DatasetSource.__dataclass_fields__ if f"`{name}" not in page]
    assert missing == []


@pytest.mark.parametrize("recipe", [*TRAINING, TINY], ids=lambda p: p.name)
def test_recipes_resolve_without_a_note(recipe):
    _, notes = resolve(recipe)
    assert notes == []


@pytest.mark.parametrize("recipe", TRAINING, ids=lambda p: p.name)
def test_a_recipe_fits_the_machine_it_names(recipe, monkeypatch, capsys):
    """The plan in its first lines, offline, from shipped configurations."""
    monkeypatch.chdir(ROOT)
    (command,) = re.findall(r"^#   headrace (plan .*)$", recipe.read_text(), flags=re.MULTILINE)
    with pytest.raises(SystemExit) as ended:
        main(command.split())
    assert ended.value.code == 0
    assert "\nFITS on " in capsys.readouterr().out


def test_recipes_reach_from_a_tenth_of_a_billion_to_120():
    names = [recipe.name for recipe in TRAINING]
    for kind in ("continued-pretraining", "sft", "lora", "from-scratch"):
        assert len([name for name in names if name.startswith(kind)]) >= 2
    for size in ("135m", "0.6b", "1b", "8b", "14b", "35b", "70b", "120b"):
        assert any(f"-{size}" in name for name in names), size
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    for name in names:
        assert f"recipes/{name}" in page, name


@pytest.mark.parametrize("depth", [12, 20, 26])
def test_dated_recipes_follow_their_rule(depth):
    config, _ = resolve(ROOT / "recipes" / f"dated-d{depth}.yaml")
    model = config.scratch_config
    width = 64 * depth
    assert (model["hidden_size"], model["num_hidden_layers"]) == (width, depth)
    assert model["num_attention_heads"] * model["head_dim"] == width
    assert model["num_attention_heads"] == model["num_key_value_heads"]
    assert model["intermediate_size"] == -(-8 * width // 3 // 128) * 128
    rows = config.per_device_train_batch_size * config.gradient_accumulation_steps
    tokens = config.max_steps * rows * config.max_length
    assert tokens == pytest.approx(20 * read_architecture(model).num_parameters, rel=0.02)
    assert config.learning_rate == pytest.approx(3e-3 * (width / 768) ** -0.5, rel=0.005)


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
