"""What of a rendered conversation is supervised.

Owns the assistant's spans. Two ways find them, and a row for which neither is certain is refused:

- the template marks them with ``{% generation %}``;
- otherwise a turn begins where the rendering of everything before it ends, and ends where the
  rendering of everything up to it ends, if both are prefixes of the whole rendering. A template
  that renders a turn differently once others follow (Qwen3 drops earlier reasoning) has no such
  prefixes; the turn is then what tells the whole from renderings that differ in this turn alone.

The end-of-turn token belongs to the turn before it: a model that is not taught to write it never
stops. Chooses no template and reads no file.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.batch import IGNORE_INDEX
from headrace.data.rows import bad_row

if TYPE_CHECKING:
    import numpy.typing as npt

    from headrace.data.conversation import Conversation
    from headrace.data.rows import Place
    from headrace.errors import DataError

    Span = tuple[int, int]

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_UNSTABLE = (
    "mark what the assistant says in the template with {% generation %}, "
    "or give rows of type: tokens with labels"
)


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """A conversation as text.

    Attributes:
        text: of the whole conversation.
        spans: characters of the supervised turns, in order.
        contents: what each of these turns says, where that is known.
    """

    text: str
    spans: list[Span]
    contents: list[Any]


class ChatRenderer:
    """Renders conversations with one template.

    Args:
        tokenizer: a Hugging Face tokenizer with character offsets.
        template: the template's text.
        train_on_eos: see :attr:`DatasetSource.train_on_eos`.
        variables: for the template.
    """

    def __init__(
        self, tokenizer: Any, template: str, *, train_on_eos: str, variables: dict[str, Any]
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._marks = _GENERATION.search(template) is not None
        self._train_on_eos = train_on_eos
        self._variables = variables
        added = getattr(tokenizer, "added_tokens_decoder", {})
        special = {int(i) for i, token in added.items() if token.special}
        special |= set(tokenizer.all_special_ids)
        self._special_ids = np.array(sorted(special), np.int64)
        self._eos = tokenizer.eos_token_id

    def encode(
        self, rows: list[tuple[Place, Conversation]]
    ) -> list[tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]]:
        """``input_ids`` and ``labels`` of each conversation, int32 ``(T,)`` both.

        Raises:
            DataError: naming the row whose supervised spans are not certain.
        """
        rendered = [self._render(place, conversation) for place, conversation in rows]
        encoded = self._tokenizer(
            [row.text for row in rendered],
            add_special_tokens=False,  # the template writes them
            return_offsets_mapping=True,
            return_attention_mask=False,
            verbose=False,
        )
        return [
            self._label(place, np.asarray(ids, np.int32), np.asarray(offsets).reshape(-1, 2), row)
            for (place, _), ids, offsets, row in zip(
                rows, encoded["input_ids"], encoded["offset_mapping"], rendered, strict=True
            )
        ]

    # -- text ------------------------------------------------------------------------------

    def _render(self, place: Place, row: Conversation) -> Rendered:
        self._refuse_unwritten(place, row)
        if self._marks and _assistant_only(row) and not row.everything:
            return self._by_marks(place, row)
        text = self._text(place, row, row.messages)
        if row.everything and all(row.supervised):
            return Rendered(text=text, spans=[(0, len(text))], contents=[None])
        turns = [turn for turn, supervised in enumerate(row.supervised) if supervised]
        return Rendered(
            text=text,
            spans=[self._span(place, row, text, turn) for turn in turns],
            contents=[row.messages[turn]["content"] for turn in turns],
        )

    def _refuse_unwritten(self, place: Place, row: Conversation) -> None:
        """A template that knows no tools would leave calls out, and the model learn silence."""
        for key, given in (
            ("tools", bool(row.tools)),
            ("tool_calls", any("tool_calls" in message for message in row.messages)),
        ):
            if given and key not in self._template:
                raise bad_row(
                    place,
                    f"the conversation has {key}, which the chat template does not write",
                    "choose a chat_template: that writes them, or remove them from the data",
                )

    def _text(
        self, place: Place, row: Conversation, messages: list[dict[str, Any]], **more: Any
    ) -> str:
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    messages,
                    tools=row.tools,
                    chat_template=self._template,
                    tokenize=False,
                    **{"add_generation_prompt": False, **self._variables, **more},
                )
            )
        # Templates raise on conversations they do not allow, in whatever way jinja comes to it.
        except Exception as error:
            raise _not_rendered(place, error) from error

    def _by_marks(self, place: Place, row: Conversation) -> Rendered:
        from transformers.utils.chat_template_utils import (  # noqa: PLC0415 - seconds of imports
            render_jinja_template,
        )

        try:
            (text,), (marks,) = render_jinja_template(
                conversations=[row.messages],
                tools=row.tools,
                chat_template=self._template,
                return_assistant_tokens_mask=True,
                **{
                    **self._tokenizer.special_tokens_map,
                    "add_generation_prompt": False,
                    **self._variables,
                },
            )
        except Exception as error:  # as in _text
            raise _not_rendered(place, error) from error
        spans = [(int(first), int(last)) for first, last in marks if first < last]
        turns = _assistants(row)
        if len(spans) == len(turns):
            chosen = [(s, t) for s, t in zip(spans, turns, strict=True) if row.supervised[t]]
            return Rendered(
                text=text,
                spans=[span for span, _ in chosen],
                contents=[row.messages[turn]["content"] for _, turn in chosen],
            )
        if not all(row.supervised[turn] for turn in turns):
            raise bad_row(
                place,
                f"the template marks {len(spans)} spans for {len(turns)} turns of the assistant, "
                "so a turn that is not supervised cannot be told apart",
                "write one {% generation %} block a turn, or supervise all turns",
            )
        return Rendered(text=text, spans=spans, contents=[None] * len(spans))

    def _span(self, place: Place, row: Conversation, text: str, turn: int) -> Span:
        """Characters of one turn, from after its header to its end-of-turn token."""
        prompt = row.messages[turn]["role"] == "assistant"
        content = row.messages[turn]["content"]
        before = row.messages[:turn]
        start_text = self._text(place, row, before, add_generation_prompt=prompt) if before else ""
        upto = self._text(place, row, row.messages[: turn + 1])
        begins, ends = text.startswith(start_text), text.startswith(upto)
        start, end = len(start_text), len(upto.rstrip())
        if not (begins and ends and end >= start):
            first, last = self._between(place, row, text, turn)
            start = start if begins and start <= last else first
            end = end if ends and end >= start else last
        if not prompt and isinstance(content, str):
            # Nobody is asked to write the header of another role.
            start += max(0, text[start:end].find(content.strip()))
        return start, end

    def _between(self, place: Place, row: Conversation, text: str, turn: int) -> Span:
        """Where a turn begins and ends, from renderings that differ in this turn alone.

        What they share at their beginnings is all that comes before what the turn says, and what
        they share at their ends begins with what ends the turn.
        """
        first, same = len(text), len(text)
        for other in "ab":  # one of them begins, and one ends, otherwise than the turn does
            changed = list(row.messages)
            changed[turn] = {"role": row.messages[turn]["role"], "content": other}
            variant = self._text(place, row, changed)
            first = min(first, _common_prefix(text, variant))
            same = min(same, _common_prefix(text[::-1], variant[::-1]))
        last = len(text) - same
        if first > last:
            raise bad_row(
                place,
                f"the chat template does not show what message {turn} says where it stands, so "
                "what is supervised is not certain",
                _UNSTABLE,
            )
        # The end-of-turn token follows at once.
        tail = re.match(r"\s*(<[^<>\s]+>|\[[^\[\]\s]+\])", text[last:])
        return first, last if tail is None else last + tail.end()

    # -- tokens ----------------------------------------------------------------------------

    def _label(
        self, place: Place, ids: npt.NDArray[np.int32], offsets: npt.NDArray[Any], row: Rendered
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        special = np.isin(ids, self._special_ids)
        known = np.zeros(len(ids), bool)
        ends = set() if self._eos is None else {int(self._eos)}
        last_end = None
        for (first, last), content in zip(row.spans, row.contents, strict=True):
            # A token that reaches back into the prompt would not be there to be predicted.
            inside = np.flatnonzero((offsets[:, 0] >= first) & (offsets[:, 0] < last))
            if not len(inside):
                continue
            known[inside] = True
            stop = int(inside[-1])
            if not special[stop] and stop + 1 < len(ids) and special[stop + 1]:
                stop += 1  # a template whose mark leaves the end-of-turn token out
            if special[stop]:
                ends.add(int(ids[stop]))
                known[stop] = self._train_on_eos in {"turn", "all"}
                last_end = stop
            elif self._train_on_eos != "none" and _says_only(row.text[first:last], content):
                raise bad_row(
                    place,
                    "the chat template ends a turn of the assistant with nothing of its own, so "
                    "the model would never learn to stop",
                    "choose a template that ends turns, or accept that with train_on_eos: none",
                )
        if self._train_on_eos == "all":
            known |= np.isin(ids, sorted(ends))
        elif self._train_on_eos == "last" and last_end is not None:
            known[last_end] = True
        return ids, np.where(known, ids, np.int32(IGNORE_INDEX))


def _not_rendered(place: Place, error: Exception) -> DataError:
    return bad_row(
        place,
        f"the chat template does not render it ({type(error).__name__}: {error})",
        "correct the order and the roles of its messages, or choose another chat_template:",
    )


def _assistants(row: Conversation) -> list[int]:
    return [i for i, message in enumerate(row.messages) if message["role"] == "assistant"]


def _assistant_only(row: Conversation) -> bool:
    pairs = zip(row.messages, row.supervised, strict=True)
    return all(message["role"] == "assistant" for message, supervised in pairs if supervised)


def _says_only(text: str, content: Any) -> bool:
    said = content.strip() if isinstance(content, str) else ""
    return bool(said) and text.rstrip().endswith(said)


def _common_prefix(one: str, other: str) -> int:
    return len(os.path.commonprefix([one, other]))  # noqa: RUF071 - characters are meant
