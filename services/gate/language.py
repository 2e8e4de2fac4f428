"""Which language a text is in, of a few: by its script, else by its commonest words.

It is to notice that answers come in another language, for which a handful of words is enough; texts of a few
words may be told as none.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter

_WORDS = {
    "en": "the and of to is in that it you for with are this on as be not have was",
    "de": "der die das und ist nicht ein eine zu den mit von sie ich auf für es im dem auch",
    "fr": "le la les et est des une un que dans pour pas vous il elle du qui sur avec ce",
    "es": "el la los las y es de que una un por con para no se del en como está su",
    "it": "il la di che e un una per non sono con è del le gli si nel come della",
    "pt": "o a os as de que e um uma para não com é do da em no na por se",
    "nl": "de het een en van is dat niet op te met voor zijn aan ik er die je",
}
# The script's name as Unicode's character names begin with it.
_SCRIPTS = {
    "HIRAGANA": "ja",
    "KATAKANA": "ja",
    "HANGUL": "ko",
    "CJK": "zh",
    "CYRILLIC": "ru",
    "ARABIC": "ar",
    "HEBREW": "he",
    "GREEK": "el",
    "DEVANAGARI": "hi",
    "THAI": "th",
}
LANGUAGES = (*_WORDS, *dict.fromkeys(_SCRIPTS.values()))
_STOPWORDS = {language: frozenset(words.split()) for language, words in _WORDS.items()}


def language_of(text: str) -> str | None:
    """Its code (ISO 639-1), or None where nothing tells."""
    letters = [letter for letter in text if letter.isalpha()]
    scripts = Counter(unicodedata.name(letter, "").split(" ")[0].split("-")[0] for letter in letters)
    found = Counter(dict.fromkeys(_SCRIPTS.values(), 0))
    for script, language in _SCRIPTS.items():
        found[language] += scripts[script]
    language, count = found.most_common(1)[0]
    # Japanese is written with Chinese characters, too.
    if found["ja"] and language in ("ja", "zh"):
        return "ja"
    if count > len(letters) / 2:
        return language
    words = Counter(re.findall(r"[^\W\d_]+", text.lower()))
    hits = {language: sum(words[word] for word in stopwords) for language, stopwords in _STOPWORDS.items()}
    best = max(hits, key=lambda each: hits[each])
    return best if hits[best] else None
