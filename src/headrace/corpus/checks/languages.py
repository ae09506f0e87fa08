"""A text's language by its script and its function words: cheap, and honest about doubt.

Only the beginning is read. The answer is an ISO 639-1 code, or ``und`` where the evidence is
thin (code, tables, lists of names). This is a filter's input, not a linguist's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

LANGUAGE_VERSION = 1

_SAMPLE_CHARS = 1200
_SAMPLE_WORDS = 100
_PLAIN_SHARE = 0.25
_MIN_HITS = 2
_MIN_SHARE = 0.06

FUNCTION_WORDS = {
    "en": "the of and to in that is was for it with as his on be at by had not are but from "
    "or have they which you were all her she there would their we been has when who "
    "will no if what this our can its into than then them so these could any may "
    "shall should also only",
    "de": "der die und in den von zu das mit sich des auf für ist im dem nicht ein eine als "
    "auch es an werden aus er hat dass sie nach wird bei einer um am sind noch wie "
    "einem über so zum",
    "fr": "de la le et les des en un du une que est pour qui dans a par plus pas au sur ne "
    "se ce il sont avec mais comme ou son nous cette ont ses été aux elle leur être "
    "était même",
    "es": "de la que el en y a los se del las un por con no una su para es al lo como más "
    "pero sus le ya o este sí porque esta entre cuando muy sin sobre también me hasta "
    "hay donde quien",
    "it": "di e il la che in un a per è una sono con non si da come più del dei nel della "
    "le al gli ha lo anche alla ma delle nella dalla essere suo questo loro stato",
    "pt": "de a o que e do da em um para é com não uma os no se na por mais as dos como mas "
    "foi ao ele das tem à seu sua ou ser quando muito há nos já está também pelo pela "
    "até",
    "nl": "de van een het en in is dat op te zijn met voor niet aan er om ook als dan maar "
    "bij of uit nog naar heeft hij worden wordt over deze meer door geen werd kan",
    "sv": "och att det i en som på är av för med den till inte om ett han men var jag från "
    "vi så kan när eller har de ska efter under",
    "da": "og at det i en er på til af for med den ikke der som de han et har men om var "
    "jeg fra vi kan når eller skal efter blev",
    "nb": "og i det er på til som en av for med den ikke at de han et har men om var jeg "
    "fra vi kan når eller skal etter ble også",
    "fi": "ja on ei se että hän oli kun mutta ovat myös tai jos niin kuin mitä joka sen ole "
    "vain",
    "pl": "i w nie na się z do to że jest o jak po co tak za od ale przez dla są być oraz "
    "który był",
    "cs": "a se v na je že to s z do o i jako za by ale ve pro si po jsem jsou který byl "
    "nebo při",
    "ro": "de și în a la cu nu că o pe un este mai din care se ce sau pentru au fost prin "
    "sunt",
    "hu": "a az és hogy nem is egy ez meg de volt ha csak már még mint el van ki vagy ami "
    "lehet",
    "tr": "bir ve bu için ile da de çok olarak daha gibi olan ne kadar sonra var ama en "
    "değil ya",
    "id": "yang dan di itu dengan untuk tidak ini dari dalam akan pada juga saya ke karena "
    "adalah ada",
    "vi": "và của là có các cho được không trong một người những với này đã khi về như để "
    "từ",
}  # fmt: skip


def words_by_language() -> Mapping[str, tuple[str, ...]]:
    """Function words, each with the languages it is one of."""
    words: dict[str, tuple[str, ...]] = {}
    for language, text in FUNCTION_WORDS.items():
        for word in text.split():
            words[word] = (*words.get(word, ()), language)
    return words


# Script ranges: first and last code point, language, and whether the script decides alone.
SCRIPTS = (
    (0x0370, 0x03FF, "el"),
    (0x0400, 0x04FF, "cyrillic"),
    (0x0530, 0x058F, "hy"),
    (0x0590, 0x05FF, "he"),
    (0x0600, 0x06FF, "ar"),
    (0x0900, 0x097F, "hi"),
    (0x0980, 0x09FF, "bn"),
    (0x0B80, 0x0BFF, "ta"),
    (0x0E00, 0x0E7F, "th"),
    (0x10A0, 0x10FF, "ka"),
    (0x3040, 0x30FF, "ja"),
    (0x4E00, 0x9FFF, "zh"),
    (0xAC00, 0xD7AF, "ko"),
)
LANGUAGES = frozenset(
    {*FUNCTION_WORDS, "und", "ru", "uk", *(name for _, _, name in SCRIPTS if name != "cyrillic")}
)
"""Every answer that a guess can be."""
UKRAINIAN_LETTERS = frozenset("іїєґІЇЄҐ")


class LanguageGuesser:
    """Made once a worker."""

    def __init__(self) -> None:
        """Build the word table."""
        self._by_word = words_by_language()
        self._english = frozenset(FUNCTION_WORDS["en"].split())

    def guess(self, text: str) -> str:
        """ISO 639-1 code, or ``und``."""
        sample = text[:_SAMPLE_CHARS]
        # Other scripts take two bytes a character and more.
        if not sample.isascii() and len(sample.encode("utf-8", "ignore")) > 1.25 * len(sample):
            script = self._by_script(sample)
            if script is not None:
                return script
        words = sample.lower().split(maxsplit=_SAMPLE_WORDS)[:_SAMPLE_WORDS]
        # Most text is plainly one language, and most of it English: no other has this share.
        if len(list(filter(self._english.__contains__, words))) > _PLAIN_SHARE * len(words) > 0:
            return "en"
        scores: dict[str, int] = {}
        for word in filter(self._by_word.__contains__, words):
            for language in self._by_word[word]:
                scores[language] = scores.get(language, 0) + 1
        if not scores:
            return "und"
        best = max(scores.values())
        if best < _MIN_HITS or best < _MIN_SHARE * len(words):
            return "und"
        # Ties go to the order of the table, so that the answer never depends on a hash.
        return next(language for language in FUNCTION_WORDS if scores.get(language, 0) == best)

    @staticmethod
    def _by_script(sample: str) -> str | None:
        counts: dict[str, int] = {}
        num_foreign = 0
        for character in sample[:1200]:
            code = ord(character)
            if code < 0x0370:
                continue
            for low, high, name in SCRIPTS:
                if low <= code <= high:
                    counts[name] = counts.get(name, 0) + 1
                    num_foreign += 1
                    break
        if num_foreign * 4 < min(len(sample), 1200):
            return None
        if counts.get("ja", 0) * 10 > num_foreign:
            return "ja"  # kana among Han characters
        best = max(counts.values())
        winner = next(name for _, _, name in SCRIPTS if counts.get(name, 0) == best)
        if winner == "cyrillic":
            return "uk" if any(character in UKRAINIAN_LETTERS for character in sample) else "ru"
        return winner
