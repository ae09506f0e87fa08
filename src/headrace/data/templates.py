"""Chat templates by name, for models that bring none.

Owns the names. Each template marks what the assistant says with ``{% generation %}``, so that
what is supervised is exact. Formats are those of the models' own documentation. Renders nothing.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError

_logger = logging.getLogger(__name__)

_CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ message.content + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_LLAMA3 = (
    "{{ bos_token or '' }}"
    "{% for message in messages %}"
    "{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' }}"
    "{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content | trim + '<|eot_id|>' }}{% endgeneration %}"
    "{% else %}{{ message.content | trim + '<|eot_id|>' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
_GEMMA = (
    "{{ bos_token or '' }}"
    "{% if messages[0].role == 'system' %}"
    "{% set before = messages[0].content | trim + '\n\n' %}{% set turns = messages[1:] %}"
    "{% else %}{% set before = '' %}{% set turns = messages %}{% endif %}"
    "{% for message in turns %}"
    "{% if message.role == 'assistant' %}"
    "{{ '<start_of_turn>model\n' }}"
    "{% generation %}{{ message.content | trim + '<end_of_turn>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}"
    "{{ '<start_of_turn>' + message.role + '\n' + (before if loop.first else '') "
    "+ message.content | trim + '<end_of_turn>\n' }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
_MISTRAL = (
    "{{ bos_token or '' }}"
    "{% if messages[0].role == 'system' %}"
    "{% set before = messages[0].content + '\n\n' %}{% set turns = messages[1:] %}"
    "{% else %}{% set before = '' %}{% set turns = messages %}{% endif %}"
    "{% for message in turns %}"
    "{% if message.role == 'assistant' %}"
    "{% generation %}{{ ' ' + message.content + eos_token }}{% endgeneration %}"
    "{% else %}"
    "{{ '[INST] ' + (before if loop.first else '') + message.content + ' [/INST]' }}"
    "{% endif %}{% endfor %}"
)
_PHI3 = (
    "{% for message in messages %}"
    "{{ '<|' + message.role + '|>\n' }}"
    "{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content + '<|end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ message.content + '<|end|>\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
TEMPLATES = {
    "chatml": _CHATML,
    "qwen": _CHATML,
    "llama3": _LLAMA3,
    "gemma": _GEMMA,
    "mistral": _MISTRAL,
    "phi_3": _PHI3,
}
DEFAULT = "tokenizer_default"
_FALLBACK = "tokenizer_default_fallback_"
_MARK = re.compile(r"<\|?\w+\|?>")


def resolve_template(given: str | None, tokenizer: Any) -> str:
    """The text of a chat template.

    Args:
        given: ``tokenizer_default`` or ``None`` for the tokenizer's own, a name of
            :data:`TEMPLATES`, ``tokenizer_default_fallback_NAME``, a file, or the template itself.
        tokenizer: whose own it may be.

    Raises:
        ConfigError: there is none of that name, or the tokenizer has none.
    """
    own = getattr(tokenizer, "chat_template", None)
    if isinstance(own, dict):
        own = own.get("default")
    name = DEFAULT if given is None else given
    if name.startswith(_FALLBACK):
        if own:
            return str(own)
        name = name.removeprefix(_FALLBACK)
    names = ", ".join(TEMPLATES)
    if name == DEFAULT:
        if not own:
            raise ConfigError(
                "chat rows need a chat template, and the tokenizer has none",
                remedy=f"chat_template: one of {names}, or a .jinja file",
            )
        return str(own)
    if name in TEMPLATES:
        _warn_of_split_marks(name, tokenizer)
        return TEMPLATES[name]
    if "{{" in name or "{%" in name:
        return name
    file = Path(name).expanduser()
    if not file.is_file():
        raise ConfigError(
            f"chat_template: {name!r} is neither a known name nor a file",
            remedy=f"{DEFAULT}, one of {names}, a .jinja file, or the template itself",
        )
    return file.read_text(encoding="utf-8")


def _warn_of_split_marks(name: str, tokenizer: Any) -> None:
    """An answer that ends in pieces of a mark has no token at which generation stops."""
    vocabulary = tokenizer.get_vocab()
    marks = {known: sorted(set(_MARK.findall(text))) for known, text in TEMPLATES.items()}
    absent = [mark for mark in marks[name] if mark not in vocabulary]
    if absent:
        whole = [known for known, found in marks.items() if vocabulary.keys() >= set(found)]
        _logger.warning(
            "chat_template: %s writes %s, which the tokenizer does not have as a token: it is "
            "trained in pieces, and generation will not stop at it; templates whose marks it has: "
            "%s, or add the tokens to model and tokenizer",
            name,
            ", ".join(absent),
            ", ".join(whole),
        )
