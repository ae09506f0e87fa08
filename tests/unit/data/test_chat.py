"""Which tokens of a conversation are supervised, told by decoding them."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.data.formats import RowEncoder
from headrace.data.parts import plan_parts
from headrace.data.sources import DatasetSource
from headrace.data.templates import TEMPLATES, resolve_template
from headrace.data.tokens import tokenise
from headrace.errors import ConfigError, DataError

# No marks: turns are told by prefixes.
PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}</call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Reasoning is kept in the last turn only, an empty one is written there: unstable prefixes.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% set said = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{% if m.role == 'assistant' and loop.last %}<think>\n{{ m.reasoning_content or '' }}\n</think>"
    "\n\n{{ said }}{% else %}{{ said }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "The rate?"},
    {"role": "assistant", "content": "Left unchanged."},
    {"role": "user", "content": "And exports?"},
    {"role": "assistant", "content": "They rose."},
]


@pytest.fixture
def chat(tokenizer):
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<|im_start|>", "<|im_end|>", "<|eot_id|>"]}
    )
    tokenizer.chat_template = PLAIN
    return tokenizer


@pytest.fixture
def supervised(tmp_path, chat):
    """Encodes one row; returns what is supervised, one text a run, and the whole text."""

    def encode(row, template=None, **keys):
        if template is not None:
            chat.chat_template = template
        path = tmp_path / "rows.jsonl"
        path.write_text(json.dumps(row) + "\n")
        source = DatasetSource(path=str(path), **{"type": "messages", **keys})
        (part,) = plan_parts(source)
        chunks = list(RowEncoder(source, chat).encode(part))
        (chunk,) = chunks
        runs, before = [], False
        for token, label in zip(chunk.input_ids, chunk.labels, strict=True):
            if label >= 0:
                assert label == token
                runs[-1:] = [runs[-1] + [token]] if before else [*runs[-1:], [token]]
            before = label >= 0
        return [chat.decode(run) for run in runs], chat.decode(chunk.input_ids)

    return encode


BOTH = ["Left unchanged.<|im_end|>", "They rose.<|im_end|>"]


@pytest.mark.parametrize("template", [PLAIN, TEMPLATES["chatml"]], ids=["prefixes", "marks"])
def test_the_assistants_turns_and_their_end_are_supervised(supervised, template):
    said, text = supervised({"messages": TALK}, template)
    assert said == BOTH
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nThe rate?")


@pytest.mark.parametrize("template", [PLAIN, TEMPLATES["chatml"]], ids=["prefixes", "marks"])
@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"train_on_eos": "none"}, ["Left unchanged.", "They rose."]),
        ({"train_on_eos": "last"}, ["Left unchanged.", "They rose.<|im_end|>"]),
        (
            {"train_on_eos": "all"},
            ["<|im_end|>", "<|im_end|>", BOTH[0], "<|im_end|>", BOTH[1]],
        ),
        ({"roles_to_train": ["user"]}, ["The rate?<|im_end|>", "And exports?<|im_end|>"]),
    ],
)
def test_what_is_supervised_can_be_chosen(supervised, template, keys, expected):
    assert supervised({"messages": TALK}, template, **keys)[0] == expected


@pytest.mark.parametrize("template", [PLAIN, TEMPLATES["chatml"]], ids=["prefixes", "marks"])
@pytest.mark.parametrize("flag", [{"train": False}, {"weight": 0}, {"train": 0}])
def test_a_turn_can_be_left_out(supervised, template, flag):
    talk = [dict(m) for m in TALK]
    talk[2] |= flag
    assert supervised({"messages": talk}, template)[0] == BOTH[1:]
    talk[2] |= {"keep": False, "train": True}
    kept = supervised({"messages": talk}, template, message_field_training="keep")[0]
    assert kept == BOTH[1:]


def test_everything_is_supervised_when_asked_for(supervised):
    said, text = supervised({"messages": TALK[1:3]}, train_on_inputs=True)
    assert said == [text]
    turns = [{**TALK[1], "train": False}, TALK[2]]
    assert supervised({"messages": turns}, train_on_inputs=True)[0] == BOTH[:1]


def test_sharegpt_is_recognised(supervised):
    turns = [
        {"from": "human", "value": "The rate?"},
        {"from": "gpt", "value": "Left unchanged."},
        {"from": "function_call", "value": '{"name": "get", "arguments": {"x": 1}}'},
        {"from": "observation", "value": "4"},
        {"from": "gpt", "value": "They rose."},
    ]
    said, text = supervised({"conversations": turns, "system": "Be brief."}, field_system="system")
    assert said == [
        BOTH[0],
        '<call>{"name": "get", "arguments": {"x": 1}}</call><|im_end|>',
        BOTH[1],
    ]
    assert "<|im_start|>system\nBe brief." in text
    assert "<|im_start|>tool\n4<|im_end|>" in text
    other = [{"speaker": "q", "say": "The rate?"}, {"speaker": "a", "say": "Left unchanged."}]
    keys = {
        "message_property_mappings": {"role": "speaker", "content": "say"},
        "roles": {"user": ["q"], "assistant": ["a"]},
        "field_messages": "talk",
    }
    assert supervised({"talk": other}, **keys)[0] == BOTH[:1]


def test_arguments_of_a_tool_call_are_an_object(supervised):
    call = {"type": "function", "function": {"name": "get", "arguments": '{"x": 1}'}, "id": None}
    turns = [TALK[1], {"role": "assistant", "content": None, "tool_calls": [call]}]
    said, _ = supervised({"messages": turns, "tools": "[]"})
    assert said == ['<call>{"name": "get", "arguments": {"x": 1}}</call><|im_end|>']


def test_a_template_that_rewrites_earlier_turns_is_followed(supervised):
    """As Qwen3's: the earlier turn has no reasoning, the last has an empty one."""
    said, _ = supervised({"messages": TALK}, THINKING)
    assert said == [BOTH[0], "<think>\n\n</think>\n\n" + BOTH[1]]


def test_a_header_that_depends_on_what_follows_is_followed(supervised):
    template = (
        "{% for m in messages %}{{ messages | length }}: {{ m.content }}<|im_end|>{% endfor %}"
    )
    assert supervised({"messages": TALK}, template)[0] == BOTH


def test_an_empty_reasoning_block_of_the_prompt_is_not_supervised(supervised):
    """As Qwen3's with enable_thinking: false, whose generation prompt holds the block."""
    template = THINKING.replace(
        "<|im_start|>assistant\n{% endif %}",
        "<|im_start|>assistant\n{% if not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
        "{% endif %}",
    )
    keys = {"chat_template_kwargs": {"enable_thinking": False}}
    assert supervised({"messages": TALK}, template, **keys)[0] == BOTH


def test_tool_calls_before_the_last_question_are_followed(supervised):
    """As Qwen3's: an empty reasoning block is written for turns after the last question only."""
    template = (
        "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' and loop.index0 > ns.last %}<think>\n\n</think>\n\n{% endif %}"
        "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}"
        "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    call = {"type": "function", "function": {"name": "get", "arguments": {"x": 1}}}
    talk = [
        TALK[1],
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "4"},
        *TALK[2:],
    ]
    said, text = supervised({"messages": talk}, template)
    assert said == [
        '<tool_call>{"name": "get", "arguments": {"x": 1}}</tool_call><|im_end|>',
        BOTH[0],
        "<think>\n\n</think>\n\n" + BOTH[1],
    ]
    assert text.count("<think>") == 1


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        # What comes last is shown first, and what it says is not.
        (
            "{% for m in messages[::-1] %}{{ loop.length }}{{ m.role }}<|im_end|>{% endfor %}",
            TALK[1:3],
            "does not show what message 1 says",
        ),
        (
            "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
            TALK[1:3],
            "never learn to stop",
        ),
        ("{{ raise_exception('no system') }}", TALK, "does not render it .*no system"),
        (
            "{% generation %}{{ raise_exception('no system') }}{% endgeneration %}",
            TALK,
            "does not render it .*no system",
        ),
        (PLAIN, [{"role": "user"}], "no 'messages.content'"),
        (PLAIN, [{"role": "user", "content": 5}, TALK[2]], "'messages.content' is int, not text"),
        (PLAIN, [{"role": "user", "content": {"a": 1}}, TALK[2]], "is dict, not text"),
        (
            PLAIN,
            [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}, TALK[2]],
            "a part that is no text",
        ),
        (PLAIN, [TALK[1], {"role": "assistant", "tool_calls": [5]}], "a tool call is 5"),
        (PLAIN, [TALK[1], {"role": "assistant", "tool_calls": [{}]}], "a tool call is {}"),
        (
            TEMPLATES["chatml"],
            [TALK[1], {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}],
            "tool_calls, which the chat template does not write",
        ),
        (PLAIN, [{"role": "judge", "content": "x"}], "role is 'judge'"),
        (PLAIN, [{"role": "user", "content": "a \ud800"}], "half a character"),
        (PLAIN, [], "no list of messages"),
        (PLAIN, [{**TALK[2], "train": "maybe"}], "'train' of a message is 'maybe'"),
    ],
)
def test_a_conversation_that_is_not_certain_is_refused(supervised, template, messages, message):
    with pytest.raises(DataError, match=message) as caught:
        supervised({"messages": messages}, template)
    assert "rows.jsonl:1:" in str(caught.value)
    assert caught.value.remedy


def test_parts_of_text_are_written_as_text(supervised):
    """Templates add content to a string, or would write a list as Python prints it."""
    parts = [{"type": "text", "text": "The "}, {"type": "text", "text": "rate?", "image": None}]
    for template in (PLAIN, *TEMPLATES.values()):
        whole = supervised({"messages": TALK[1:3]}, template)
        split = supervised({"messages": [{"role": "user", "content": parts}, TALK[2]]}, template)
        assert split == whole


def test_tools_that_the_template_leaves_out_are_refused(supervised):
    row = {"messages": TALK, "tools": [{"type": "function", "function": {"name": "f"}}]}
    with pytest.raises(DataError, match="has tools, which the chat template does not write"):
        supervised(row, TEMPLATES["chatml"])


@pytest.mark.parametrize("column", ["images", "videos", "audio"])
def test_rows_with_media_are_refused(supervised, column):
    """Their text speaks of what the model would not see."""
    with pytest.raises(DataError, match=f"the row has '{column}', and headrace trains on text"):
        supervised({"messages": TALK, column: ["a.png"]})
    assert supervised({"messages": TALK, column: []}) == supervised({"messages": TALK})


def test_marks_that_do_not_match_the_turns_are_refused_when_it_matters(supervised):
    template = (
        "{% generation %}{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
        "{% endgeneration %}"
    )
    assert len(supervised({"messages": TALK}, template)[0]) == 1
    talk = [dict(m) for m in TALK]
    talk[2]["train"] = False
    with pytest.raises(DataError, match="marks 1 spans for 2 turns"):
        supervised({"messages": talk}, template)


def test_template_names(chat, tmp_path):
    chat.chat_template = None
    with pytest.raises(ConfigError, match="the tokenizer has none"):
        resolve_template(None, chat)
    assert resolve_template("tokenizer_default_fallback_llama3", chat) == TEMPLATES["llama3"]
    chat.chat_template = PLAIN
    assert resolve_template("tokenizer_default_fallback_llama3", chat) == PLAIN
    assert resolve_template("tokenizer_default", chat) == PLAIN
    file = tmp_path / "mine.jinja"
    file.write_text("{{ messages }}")
    assert resolve_template(str(file), chat) == "{{ messages }}"
    with pytest.raises(ConfigError, match="neither a known name nor a file"):
        resolve_template("lama3", chat)


def test_marks_that_the_tokenizer_would_split_are_told(chat, caplog):
    resolve_template("phi_3", chat)
    assert "<|end|>, which the tokenizer does not have as a token" in caplog.text
    caplog.clear()
    chat.add_tokens(["<|assistant|>", "<|end|>"])
    resolve_template("phi_3", chat)
    assert caplog.text == ""


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_every_named_template_supervises_the_assistant_and_ends_its_turns(supervised, name):
    said, text = supervised({"messages": TALK}, TEMPLATES[name])
    assert len(said) == 2
    assert said[0].strip().startswith("Left unchanged.")
    assert len(said[0].strip()) > len("Left unchanged.")
    assert "Be brief." in text
    assert not any("exports" in run or "rate" in run for run in said)


def test_the_template_is_part_of_the_caches_name(tmp_path, chat):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": TALK}) + "\n")
    source = DatasetSource(path=str(path), type="messages")
    one = tokenise(source, chat, cache_dir=tmp_path / "cache").key
    chat.chat_template = TEMPLATES["llama3"]
    assert tokenise(source, chat, cache_dir=tmp_path / "cache").key != one


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["name", "function", "arguments", "type"]), inner)
    ),
    max_leaves=6,
)
MESSAGES = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["user", "assistant", "system", "tool", "judge"]) | VALUES,
        "from": st.sampled_from(["human", "gpt", "function_call"]) | VALUES,
        "content": st.text(max_size=8) | VALUES,
        "value": st.text(max_size=8) | VALUES,
        "tool_calls": VALUES,
        "train": VALUES,
        "weight": VALUES,
    },
)
ROWS = st.fixed_dictionaries(
    {"messages": st.lists(MESSAGES, max_size=4) | VALUES},
    optional={"tools": VALUES, "about": VALUES},
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
@given(row=ROWS, template=st.sampled_from([PLAIN, TEMPLATES["chatml"], THINKING]))
def test_whatever_a_row_holds_it_is_encoded_or_named(supervised, row, template):
    refusal = None
    try:
        supervised(row, template, field_system="about")
    except DataError as error:
        refusal = error
    if refusal is not None:
        assert "rows.jsonl:1:" in str(refusal)
        assert refusal.remedy
