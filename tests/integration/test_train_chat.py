"""Training on conversations: the template that is used is the one that is saved."""

import json

import pytest
from transformers import AutoTokenizer

from headrace.data.templates import TEMPLATES
from headrace.errors import ConfigError


@pytest.fixture
def talks(tmp_path, sentences):
    path = tmp_path / "talks.jsonl"
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"What of {n}?"},
                {"role": "assistant", "content": sentences[n % 8]},
            ]
        }
        for n in range(20)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [{"path": str(path), "type": "messages"}]


def test_a_chat_run_counts_the_assistants_tokens_and_saves_its_template(run_config, talks):
    result = run_config(datasets=talks, chat_template="mistral", max_steps=4)
    assert 0 < result.num_supervised_tokens < result.num_tokens
    saved = AutoTokenizer.from_pretrained(result.checkpoint)
    assert saved.chat_template == TEMPLATES["mistral"]


def test_chat_rows_without_a_template_are_refused_before_the_model_is_made(run_config, talks):
    with pytest.raises(ConfigError, match="the tokenizer has none") as caught:
        run_config(datasets=talks)
    assert "chatml" in caught.value.remedy
