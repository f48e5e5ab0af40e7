"""Workspaces: what a sandbox sees as `/mnt/data`, kept on disk, removed without the host walking in.

Above: the bubblewrap backend. Below: the file system. A workspace is `ROOT/workspaces/NAME/data`; the directories above
`data` are 0700 and the host's own, `data` belongs to the uid of the sandbox. What lies in it was made by user code:
it is removed inside a sandbox that sees nothing else.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from sandboxes.backends.owner_files import checked

DATA = "data"


class Workspaces:
    def __init__(self, root: Path) -> None:
        self._workspaces = root / "workspaces"
        self._trash = root / "trash"

    def make(self) -> None:
        """Raises OSError."""
        for directory in (self._workspaces, self._trash):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def data(self, name: str) -> Path:
        return self._workspaces / checked(name) / DATA

    def names(self) -> list[str]:
        """Of all that are there. Raises OSError."""
        return sorted(path.name for path in self._workspaces.iterdir())

    def uid(self, name: str) -> int | None:
        """Who its files belong to; None when it does not exist."""
        try:
            return os.lstat(self.data(name)).st_uid
        except FileNotFoundError:
            return None

    def create(self, name: str, uid: int) -> None:
        """Makes an empty one. Raises OSError."""
        data = self.data(name)
        data.parent.mkdir(mode=0o700, exist_ok=True)
        aside = data.with_name(f"{DATA}.{secrets.token_hex(4)}")
        aside.mkdir(mode=0o700)
        if os.geteuid() == 0:
            os.chown(aside, uid, uid)
        aside.rename(data)  # with its owner, or not at all

    def give(self, name: str, uid: int) -> None:
        """Gives all of its files to another uid (the range of uids is another one now). Raises OSError."""
        top = self.data(name)
        # By descriptors, following no link; nothing runs that could change the tree meanwhile.
        for _, directories, names, descriptor in os.fwalk(top, follow_symlinks=False):
            for entry in (*directories, *names):
                os.chown(entry, uid, uid, dir_fd=descriptor, follow_symlinks=False)
        os.chown(top, uid, uid, follow_symlinks=False)  # last: an interrupted change is seen and done again

    def discard(self, name: str) -> Path | None:
        """Takes it out of sight at once. The path is what is still to be removed. Raises OSError."""
        aside = self._trash / secrets.token_hex(8)
        try:
            self.data(name).parent.rename(aside)
        except FileNotFoundError:
            return None
        return aside

    def discarded(self) -> list[Path]:
        """What an earlier host did not finish removing."""
        return sorted(self._trash.iterdir())

    @staticmethod
    def removed(path: Path) -> None:
        """Removes the empty rest of a discarded one, after its contents. Raises OSError when it is not empty."""
        with contextlib.suppress(FileNotFoundError):
            for entry in path.iterdir():
                entry.rmdir()
            path.rmdir()
