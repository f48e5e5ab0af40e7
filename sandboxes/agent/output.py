"""Bytes that user code writes: decoded as they come, head and tail kept, the rest counted. Memory stays flat.

Above: `executions` and `python_process`. Below: nothing.
"""

from __future__ import annotations

import codecs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_decoder = codecs.getincrementaldecoder("utf-8")


class Capture:
    """The text of one execution's output, at most `cap` characters of it: the first half and the last half.

    `spill` is called once, when something has to be cut, with everything so far, and then gives a taker of each
    further piece: it is how the whole comes into a file.
    """

    def __init__(self, cap: int, spill: Callable[[bytes], Callable[[bytes], None]] | None = None) -> None:
        self._decoder: codecs.IncrementalDecoder | None = None  # of most executions nothing is to be decoded
        self._head_cap = (cap + 1) // 2
        self._tail_cap = cap - self._head_cap
        self._head: list[str] = []
        self._head_length = 0
        self._tail = ""
        self._after_head = 0  # characters past the head, those in the tail included
        self._spill = spill
        self._raw: list[bytes] = []
        self._take: Callable[[bytes], None] | None = None
        self.bytes_out = 0
        self._bytes_kept_raw = 0

    def add(self, data: bytes) -> str:
        """Takes a piece and returns its text (what it completes of one)."""
        self.bytes_out += len(data)
        if self._decoder is None:
            self._decoder = _decoder("replace")
        text = self._decoder.decode(data)
        self._keep(text)
        if self._take is not None:
            self._take(data)
        elif self._spill is not None:
            self._raw.append(data)
            if self.cut_characters:
                self._take = self._spill(b"".join(self._raw))
                self._raw = []
                self._spill = None
            elif len(self._raw) > 256:
                self._raw = [b"".join(self._raw)]
        return text

    def finish(self) -> None:
        """What is left of a character that never came to its end counts as one."""
        if self._decoder is not None:
            self._keep(self._decoder.decode(b"", True))
            self._raw = []
        self._spill = self._take = None  # they know whose output it is, who knows this

    def _keep(self, text: str) -> None:
        room = self._head_cap - self._head_length
        if room > 0:
            piece = text[:room]
            self._head.append(piece)
            self._head_length += len(piece)
            text = text[room:]
            if len(self._head) > 256:
                self._head = ["".join(self._head)]
        if text:
            self._after_head += len(text)
            if len(text) >= self._tail_cap:
                self._tail = text[len(text) - self._tail_cap :]
            else:
                tail = self._tail + text
                self._tail = tail[max(0, len(tail) - self._tail_cap) :]

    @property
    def cut_characters(self) -> int:
        return self._after_head - len(self._tail)

    @property
    def bytes_cut(self) -> int:
        """Bytes of the text that was left out, as UTF-8."""
        if not self.cut_characters:
            return 0
        kept = len("".join(self._head).encode("utf-8", "replace")) + len(self._tail.encode("utf-8", "replace"))
        return max(0, self.bytes_out - kept)

    def frame(self, file: str | None = None, complete: bool = True) -> dict[str, object]:
        head, tail = "".join(self._head), self._tail
        if not self.cut_characters:
            head, tail = head + tail, ""
        return {
            "head": head,
            "tail": tail,
            "cut_characters": self.cut_characters,
            "file": file,
            "file_complete": complete,
        }
