"""Words for the full text index: scripts without spaces become bigrams, so that any two characters are found."""

from __future__ import annotations

import re
import unicodedata

# Kana, CJK, Hangul; Thai, Lao, Tibetan, Myanmar, Khmer.
_UNSPACED = (
    "\u3005-\u3007\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uac00-\ud7af\U00020000-\U0003ffff"
    "\u0e00-\u0eff\u0f40-\u0fbc\u1000-\u109f\u1780-\u17d3"
)
_RUN = re.compile(f"[{_UNSPACED}]+")
_TERM = re.compile(rf"[{_UNSPACED}]+|[^\W_]+(?:['\u2019._-][^\W_]+)*")
_MAX_TERMS = 32
_WIDTH = 280
# Words that say nothing of a query's subject; they only cost time when any word may match.
_COMMON = frozenset(
    {"a", "an", "and", "are", "as", "at", "be", "by", "can", "do", "does", "for", "from", "how", "i", "in", "is", "it"}
    | {"of", "on", "or", "that", "the", "this", "to", "was", "what", "when", "where", "which", "who", "why", "with"}
)


def index_text(text: str) -> str:
    """Text as it is given to the index."""
    return _RUN.sub(lambda match: f" {' '.join(_bigrams(match.group()))} ", unicodedata.normalize("NFKC", text))


def _bigrams(run: str) -> list[str]:
    """Overlapping pairs, and the last character alone so that it too can be found as the beginning of a word."""
    return [run[index : index + 2] for index in range(len(run))]


def query_terms(query: str) -> list[str]:
    """The words of a query, in order, each once."""
    found = _TERM.findall(unicodedata.normalize("NFKC", query).casefold())
    return list(dict.fromkeys(found))[:_MAX_TERMS]


def every_query(query: str) -> str:
    """FTS5 expression for sections with every word; empty when the query has none."""
    terms = query_terms(query)
    telling = [term for term in terms if term not in _COMMON] or terms
    return " AND ".join(map(_expression, telling))


def any_query(query: str) -> str:
    """FTS5 expression for sections with any word; runs of an unspaced script match by any of their pairs."""
    terms = query_terms(query)
    telling = [term for term in terms if term not in _COMMON] or terms
    pairs: list[str] = []
    for term in telling:
        pairs += _bigrams(term)[:-1] if _RUN.fullmatch(term) and len(term) > 2 else [term]
    return " OR ".join(map(_expression, dict.fromkeys(pairs[:_MAX_TERMS])))


def _expression(term: str) -> str:
    if not _RUN.fullmatch(term):
        return f'"{term}"'
    if len(term) == 1:
        return f'"{term}"*'
    return '"' + " ".join(_bigrams(term)[:-1]) + '"'


def snippet(text: str, query: str) -> str:
    """The part of a section around the first of the query's words, on one line."""
    text = " ".join(text.split())
    folded = text.casefold()
    places = [place for term in query_terms(query) if term not in _COMMON and (place := folded.find(term)) >= 0]
    start = max(min(places, default=0) - _WIDTH // 4, 0)
    if start:
        start = text.find(" ", start, start + 40) + 1 or start
    part = text[start : start + _WIDTH]
    return ("…" if start else "") + part + ("…" if start + _WIDTH < len(text) else "")
