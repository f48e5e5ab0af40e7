"""Images that a cell shows: written as files, listed in its result."""

from __future__ import annotations

from .pristine import BUILTINS

TYPE_CHECKING = False
if TYPE_CHECKING:
    import os
else:
    from .pristine import OS as os

globals()["__builtins__"] = BUILTINS

ENDINGS = {"image/png": "png", "image/jpeg": "jpg", "image/svg+xml": "svg"}
# A loop that draws must not bury the result; the rest is counted in the note.
_MOST = 50


class Images:
    """The images of one cell, as `figure-<cell>-<count>.<ending>` in `directory` (made when first needed)."""

    def __init__(self, number: int, directory: str) -> None:
        self.saved: list[dict[str, str]] = []
        self.figures: set[int] = set()
        """Identities of the matplotlib figures among them: none is shown twice by one cell."""
        self._number = number
        self._directory = directory
        self._skipped = 0
        self._reason = ""

    def save(self, data: bytes, mime: str) -> str | None:
        """Writes one image and returns its path; None (and a later note) where that is not possible."""
        if len(self.saved) >= _MOST:
            self.skip(f"a cell shows at most {_MOST}")
            return None
        name = f"figure-{self._number}-{len(self.saved) + 1}.{ENDINGS[mime]}"
        path = f"{self._directory}/{name}"
        try:
            if not os.path.isdir(self._directory):
                os.makedirs(self._directory)
                os.chmod(self._directory, 0o755)  # whatever umask the user's code set
            _write(path, data)
        except OSError as error:
            self.skip(error.strerror or type(error).__name__)
            return None
        self.saved.append({"path": path, "mime": mime})
        return path

    def skip(self, reason: str) -> None:
        """Counts an image that is not shown, and why."""
        self._skipped += 1
        self._reason = reason

    def note(self) -> str | None:
        """A sentence about the images that were not saved."""
        if not self._skipped:
            return None
        count = "1 image was" if self._skipped == 1 else f"{self._skipped} images were"
        return f"{count} not saved: {self._reason}."


def _write(path: str, data: bytes) -> None:
    """A whole file or none. A link planted at `path` is replaced, not followed."""
    if os.path.lexists(path):
        os.unlink(path)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        os.fchmod(fd, 0o644)
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
    except OSError:
        os.unlink(path)
        raise
    finally:
        os.close(fd)
