"""What an object shows of itself besides its repr: images as files, and the text behind an empty-handed repr.

The object's own `_repr_*_` methods are called directly: IPython is not needed for that.
"""

from __future__ import annotations

from . import figures, pristine
from .images import ENDINGS, Images
from .pristine import BUILTINS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

globals()["__builtins__"] = BUILTINS

_METHODS = (("image/png", "_repr_png_"), ("image/jpeg", "_repr_jpeg_"), ("image/svg+xml", "_repr_svg_"))
_TEXTS = (("text/markdown", "_repr_markdown_"), ("text/latex", "_repr_latex_"), ("text/html", "_repr_html_"))
# IPython's display objects: their repr says nothing.
_EMPTY_REPR = "<IPython.core.display."


def save_images(value: object, images: Images) -> None:
    """Saves the image that `value` shows of itself, if any. Raises what its methods raise."""
    if figures.is_figure(value):
        if not figures.is_open(value):
            figures.save(value, images)
        return
    kind = type(value)
    for mime, name in _METHODS:
        if getattr(kind, name, None) is not None and save_data({mime: getattr(value, name)()}, images):
            return
    if getattr(kind, "_repr_mimebundle_", None) is not None:
        bundle = value._repr_mimebundle_(include=None, exclude=None)  # type: ignore[attr-defined]
        save_data(bundle[0] if isinstance(bundle, tuple) else bundle, images)


def save_data(bundle: Any, images: Images) -> bool:
    """Saves the best image of a MIME bundle (type → bytes, or base64 or SVG text). False if it has none."""
    for mime in ENDINGS:
        data = bundle.get(mime) if isinstance(bundle, dict) else None
        if isinstance(data, tuple):  # data and metadata
            data = data[0]
        if isinstance(data, str):
            data = data.encode() if mime == "image/svg+xml" else pristine.load("base64").b64decode(data)
        if isinstance(data, (bytes, bytearray)):
            images.save(bytes(data), mime)
            return True
    return False


def better_text(value: object, text: str) -> str:
    """`text`, the repr of `value`, or the markdown, LaTeX or HTML text where the repr says nothing."""
    if not text.startswith(_EMPTY_REPR):
        return text
    bundle = {}
    for mime, name in _TEXTS:
        if getattr(type(value), name, None) is not None:
            bundle[mime] = getattr(value, name)()
    return bundle_text({"text/plain": text, **bundle})


def bundle_text(bundle: dict[str, Any]) -> str:
    """The text of a MIME bundle: its plain text, unless that says nothing."""
    plain = bundle.get("text/plain")
    if isinstance(plain, str) and not plain.startswith(_EMPTY_REPR):
        return plain
    for mime, _ in _TEXTS:
        text = bundle.get(mime)
        if isinstance(text, str):
            return _strip_tags(text) if mime == "text/html" else text
    return str(plain or "")


def _strip_tags(html: str) -> str:
    text = pristine.load("re").sub(r"(?is)<(script|style)\b.*?</\1\s*>|<[^>]*>", "", html)
    plain: str = pristine.load("html").unescape(text).strip()
    return plain
