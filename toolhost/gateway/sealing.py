"""Reasoning that travels with the client instead of being kept here: encrypted, so that nobody reads or changes it.

Above: `runs` (seals), `items` (opens). Below: `cryptography`'s Fernet. Keys rotate: the first of the file encrypts, all
decrypt. Replicas share one file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cryptography.fernet import Fernet, InvalidToken, MultiFernet

from toolhost.errors import ConfigurationError
from toolhost.gateway.errors import bad_request

PREFIX = "thr1_"
MAKE = "python -c 'from cryptography.fernet import Fernet as F; print(F.generate_key().decode())'"


class Sealer:
    """`seal` and `open`, for one principal each: what one was given, another cannot use."""

    def __init__(self, keys: MultiFernet) -> None:
        self._keys = keys

    @classmethod
    def load(cls, file: Path, *, make: bool) -> Sealer:
        """Keys from a file, one a line, newest first. `make`: one that is not there is made, with one key; otherwise
        it is an error, for replicas would each make keys of their own. Raises ConfigurationError.
        """
        try:
            if make:
                _make(file)
            lines = [line.strip() for line in file.read_text(encoding="ascii").splitlines() if line.strip()]
            return cls(MultiFernet([Fernet(line) for line in lines]))
        except FileNotFoundError:
            raise ConfigurationError(
                f"there is no gateway keys file {file}; make it once, for all replicas: (umask 077; {MAKE} > {file}). "
                "Without --keys-file a gateway makes its own in the state directory"
            ) from None
        except (OSError, ValueError) as error:
            # A key's text is not repeated: it is a secret.
            reason = error.strerror if isinstance(error, OSError) else "expected Fernet keys, one a line"
            raise ConfigurationError(f"gateway keys file {file} cannot be used: {reason}") from None

    def seal(self, principal: str, reasoning: Mapping[str, Any]) -> str:
        """A reasoning item's content, as text for `encrypted_content`."""
        data = json.dumps({"principal": principal, "reasoning": reasoning}).encode()
        return PREFIX + self._keys.encrypt(data).decode("ascii")

    def open(self, principal: str, text: str) -> dict[str, Any]:
        """What was sealed. Raises ApiError 400 for text that was changed, that another sealed, or whose key is gone."""
        try:
            data = json.loads(self._keys.decrypt(text.removeprefix(PREFIX).encode("ascii")))
        except (InvalidToken, ValueError):
            data = {}
        if not text.startswith(PREFIX) or data.get("principal") != principal:
            raise bad_request(
                "the encrypted_content of a reasoning item could not be verified: replay it unchanged, or leave it out",
                "input",
                "invalid_encrypted_content",
            )
        reasoning: dict[str, Any] = data["reasoning"]
        return reasoning


def _make(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        made = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return
    with os.fdopen(made, "wb") as new:
        new.write(Fernet.generate_key() + b"\n")
