"""The language of a short text, by its script and its function words."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Set

from rag_posfix.text import is_pair, split_words

_FUNCTION_WORDS = {
    "en": (
        "the a an of and or to in on for with from by is are was were be did does do has have had it its they "
        "their he she his her this that these those what which who whom whose when where why how many much "
        "not"
    ),
    "de": (
        "der die das den dem des ein eine einen einem einer und oder zu im in auf für mit von aus ist sind "
        "war waren hat haben hatte wird wurde wurden es sie er ihr ihre sein seine was welche welcher welches "
        "wer wen wann wo warum wie viele nicht"
    ),
    "fr": (
        "le la les un une des du de et ou à au aux dans sur pour avec par est sont était étaient a ont avait "
        "il elle ils elles son sa ses leur ce cette ces que quel quelle quels quelles qui quand où pourquoi "
        "comment combien ne pas qu"
    ),
    "es": (
        "el la los las un una unos de del y o en para con por es son era eran fue fueron ha han había él ella "
        "su sus este esta estos que qué cuál cuáles quién quiénes cuándo dónde cómo cuánto cuántos no se"
    ),
    "it": (
        "il lo la gli le un uno una di del della dei e o a in su per con da è sono era erano ha hanno aveva "
        "suo sua che quale quali chi quando dove perché come quanti non"
    ),
    "pt": (
        "o a os as um uma de do da dos das e ou em no na para com por é são era foi foram tem seu sua que "
        "qual quais quem quando onde como quantos não"
    ),
    "nl": (
        "de het een van en of in op voor met door is zijn was waren heeft had hij zij haar dit dat deze wat "
        "welke wie wanneer waar waarom hoe veel niet"
    ),
}
_WORDS = {language: frozenset(words.split()) for language, words in _FUNCTION_WORDS.items()}

_REPLIES = frozenset(["yes", "no", "ja", "nein", "oui", "non", "sí", "si", "sim", "não", "nee", "not"])
"""Replies that every text contains in another sense."""

_REPLY = re.compile(r"\W*(?:(?:yes|ja|oui|s\u00ed|sim)\b|(?:no|nein|non|n\u00e3o|nee)(?:[,;:]|\.\s))", re.IGNORECASE)

_STOP_REPLIES = frozenset(split_words(" ".join(_REPLIES)))
_STOP_WORDS = {language: frozenset(split_words(text)) | _STOP_REPLIES for language, text in _FUNCTION_WORDS.items()}

_SCRIPTS = {"HIRAGANA": "ja", "KATAKANA": "ja", "HANGUL": "ko", "CJK": "zh", "THAI": "th"}
_READ_CHARACTERS = 2000
_HIRAGANA = re.compile("[\u3041-\u309f]+")
_FUNCTIONAL_PAIR = re.compile(
    "[的了是在和与及而也这那之于吗呢吧不没什么谁哪怎은는을를의에로도와과입니]|무엇|누구|언제|어디|얼마"
)
"""Characters and words of Chinese and Korean: function and question words, particles, parts of verb endings."""


def language_of(text: str) -> str | None:
    """Return the code of the language of a short text, by its script or its function words; None if it is unclear.

    Known are Chinese, Japanese, Korean and Thai by script, and the languages of ``_FUNCTION_WORDS`` if one of them has
    more function words in the text than every other. Chinese with Kana is Japanese. The beginning of a long text
    decides.
    """
    text = text[:_READ_CHARACTERS]
    script = _script_of(text)
    if script == "LATIN":
        languages = _languages_of(text)
        return languages.pop() if len(languages) == 1 else None
    if script == "CJK" and any(_script_of(character) in ("HIRAGANA", "KATAKANA") for character in text):
        return "ja"
    return _SCRIPTS.get(script or "")


def stop_words(text: str) -> Set[str]:
    """Return function words of the language of ``text``, else of English, and yes and no, as ``split_words`` does."""
    return _STOP_WORDS.get(language_of(text) or "en", _STOP_REPLIES)


def is_reply(answer: str) -> bool:
    """Return whether an answer begins with yes or no: then its other words may be those of the question in others."""
    return _REPLY.match(answer) is not None


def content_words(text: str) -> Set[str]:
    """Return the words of a question, as ``split_words`` does, but function words and those that make it broad."""
    words = (word for word in split_words(_BROAD.sub(" ", text)) if not is_functional_pair(word))
    return frozenset(words) - stop_words(text)


def is_broad(question: str) -> bool:
    """Return whether a question asks for a list, a comparison or a summary, in a language of the shipped templates."""
    return _BROAD.search(question) is not None


def asks_for_list(question: str) -> bool:
    """Return whether several passages may have parts of the answer: a broad question, or "which offices have"."""
    return is_broad(question) or _SEVERAL.search(question) is not None


_PLURAL = r"(?:\w*(?:[^\W\d_](?<![us])s)|people|men|women|children)"
_SEVERAL = re.compile(
    rf"\bwhich (?:of (?:the|these|those|our|your) )?(?:[\w-]+ ){{0,2}}?(?!does\b|was\b|has\b|is\b){_PLURAL} "
    r"(?:is|was|does|has|(?!\w+s\b)\w+)\b|"
    rf"\bwhat (?:[\w-]+ ){{0,2}}?(?!does\b|was\b|has\b|is\b){_PLURAL} "
    r"(?:are|were|have|had|do|did|can|could|may|must|should|will|would)\b|\bwho are (?:the|all)\b|"
    r"\bwelche[nr]? (?:\w+ ){1,3}?(?:sind|haben|hatten|waren|wurden|können|dürfen|müssen|werden|gibt es|bieten)\b|"
    r"\bquel(?:le)?s\b|\bcuáles\b|\bqué \w+s (?:son|están|tienen|hay|pueden|eran)\b|\bquali\b|\bquais\b|"
    r"\bwelke \w+ (?:zijn|hebben|kunnen|mogen)\b|哪些|어떤 \w+들",
    re.IGNORECASE,
)

_VERBS = (
    r"list(?: all)?|name all|enumerate|compare|summari[sz]e|liste\w*|nenne alle|vergleiche\w*|fasse|fassen|énumère\w*|"
    r"compare[rz]|résume\w*|enumera\w*|lista|compara\w*|resum\w+"
)
_PHRASES = (
    r"an overview|a summary|a list of|tell me (?:more )?about|what do (?:you|we) know about|is known about|"
    r"differences? between|überblick|erzähle? mir|was (?:weißt du|wissen sie) über|was ist über|"
    r"unterschiede? zwischen|un aperçu|un résumé|parle[rz]?[- ]moi|que (?:sais|savez)|différences? entre|"
    r"un resumen|háblame|cuéntame|qué (?:sabes|se sabe)|diferencias? entre"
)
_BROAD = re.compile(
    rf"(?:^|[.!?:,]\s*|\b(?:please|bitte|(?:can|could|will|would) you|kannst du|können sie) )(?:{_VERBS})\b|"
    rf"\b(?:{_PHRASES})\b|"
    "列出|列举|比较|总结|概括|概述|介绍一下|知道什么|区别|나열|비교|요약|개요|알려진|알고 있|차이",
    re.IGNORECASE,
)


def is_functional_pair(word: str) -> bool:
    """Return whether a pair of characters has a function word or particle in Chinese, Japanese or Korean."""
    return is_pair(word) and bool(_HIRAGANA.fullmatch(word) or _FUNCTIONAL_PAIR.search(word))


def same_language(text: str, context: str) -> bool:
    """Return whether a text may be in the language of ``context``: of its script, and of no other language's words.

    Texts whose language cannot be told apart, such as two words without a function word, count as the same.
    """
    script = _script_of(text)
    if script is not None and script not in {_script_of(word) for word in context.split()}:
        return False
    languages = _languages_of(text), _languages_of(context)
    return not all(languages) or not languages[0].isdisjoint(languages[1])


def _script_of(text: str) -> str | None:
    """Return the first word of the Unicode names of most letters: LATIN, CJK, HANGUL, ...; None without letters."""
    if text.isascii():  # nearly always, and the names of its letters need not be looked up
        return "LATIN" if any(map(str.isalpha, text)) else None
    scripts = Counter(unicodedata.name(letter, "").partition(" ")[0] for letter in text if letter.isalpha())
    return scripts.most_common(1)[0][0] if scripts else None


def _languages_of(text: str) -> set[str]:
    """Return the languages with the most function words in ``text``; none if it has no such word."""
    words = re.findall(r"\w+", text.casefold())
    counts = {language: sum(word in known for word in words) for language, known in _WORDS.items()}
    most = max(counts.values())
    return {language for language, count in counts.items() if count == most} if most else set()
