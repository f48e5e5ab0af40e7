"""Which encoding a document's bytes are in: header, byte order mark, meta, XML declaration, then detection."""

from __future__ import annotations

import codecs
import re

_BOMS = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))
_META = re.compile(rb"""<meta[^>]{0,300}?charset\s*=\s*["']?\s*([A-Za-z0-9_.:-]{2,40})""", re.IGNORECASE)
_XML = re.compile(rb"""^\s*<\?xml[^>]{0,200}?encoding\s*=\s*["']([A-Za-z0-9_.:-]{2,40})""")
# The WHATWG Encoding Standard reads these labels as their Windows supersets.
_ALIASES = {
    "iso-8859-1": "cp1252",
    "latin1": "cp1252",
    "ascii": "cp1252",
    "us-ascii": "cp1252",
    "gb2312": "gb18030",
    "gbk": "gb18030",
    "x-gbk": "gb18030",
    "ks_c_5601-1987": "cp949",
    "euc-kr": "cp949",
    "shift_jis": "cp932",
    "shift-jis": "cp932",
    "x-sjis": "cp932",
    "big5": "big5hkscs",
    "iso-8859-9": "cp1254",
    "tis-620": "cp874",
    "windows-874": "cp874",
    "x-user-defined": "cp1252",
    "utf8": "utf-8",
}
# Codecs of text that no page is in: Python's own notations, two of host names, one that always fails, and UTF-7, in
# which a page could hide what it says (the Encoding Standard leaves it out for that).
_NOT_OF_PAGES = frozenset({"idna", "punycode", "undefined", "utf-7", "unicode-escape", "raw-unicode-escape", "charmap"})
_SNIFFED = 4096
_DETECTED = 32768


def decode(body: bytes, charset: str | None) -> str:
    """Decode a document; what cannot be decoded becomes U+FFFD.

    Args:
        charset: From the Content-Type header, or None.
    """
    for mark, name in _BOMS:
        if body.startswith(mark):
            return body[len(mark) :].decode("utf-8" if name == "utf-8-sig" else name, "replace")
    for label in (charset, _declared(body)):
        codec = _codec(label)
        if codec is not None:
            return body.decode(codec, "replace")
    try:
        return body.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.start > len(body) - 4:
            return body.decode("utf-8", "replace")
    return body.decode(_detect(body[:_DETECTED]), "replace")


def _declared(body: bytes) -> str | None:
    head = body[:_SNIFFED]
    match = _XML.search(head) or _META.search(head)
    if match is None:
        return None
    label = match.group(1).decode("ascii")
    # A declaration that could be read as ASCII cannot be UTF-16 (HTML standard, prescan).
    return "utf-8" if label.lower().startswith("utf-16") else label


def _codec(label: str | None) -> str | None:
    if not label:
        return None
    name = label.strip().strip("\"'").lower()
    try:
        info = codecs.lookup(_ALIASES.get(name, name))
    except (LookupError, ValueError):
        return None
    # Text encodings only: "hex" or "zlib" are codecs too.
    return info.name if getattr(info, "_is_text_encoding", True) and info.name not in _NOT_OF_PAGES else None


def _detect(sample: bytes) -> str:
    from charset_normalizer import from_bytes  # about 20 ms to import, seldom needed

    best = from_bytes(sample).best()
    return _codec(best.encoding) or "cp1252" if best is not None else "cp1252"
