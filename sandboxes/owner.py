"""Who owns a sandbox: the host's identity and the secret that its tickets and nonces are derived from.

Above: the manager (tickets), backends (nonces, labels). Below: the standard library.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Owner:
    """One host's identity. `id` is public (labels, owner files); `secret` never leaves this process but as HMACs."""

    id: str
    secret: bytes = field(repr=False)

    @classmethod
    def load(cls, state_dir: Path) -> Owner:
        """The owner whose state is kept in `state_dir`, made on first use (mode 0600). Raises OSError."""
        path = state_dir / "owner"
        try:
            text = path.read_text()
        except FileNotFoundError:
            state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
            aside = path.with_name(f"owner.{os.getpid()}.{secrets.token_hex(4)}")
            descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(f"{secrets.token_hex(8)} {secrets.token_hex(32)}\n")
                file.flush()
                os.fsync(file.fileno())
            try:
                os.link(aside, path)  # of two that race, one wins and both read the winner's
            except FileExistsError:
                pass
            finally:
                aside.unlink()
            text = path.read_text()
        ident, secret = text.split()
        return cls(ident, bytes.fromhex(secret))

    def nonce(self, sandbox_id: str) -> str:
        """What a host must show to the agent of this sandbox."""
        return self._mac("nonce", sandbox_id)

    def ticket(self, sandbox_id: str, session: str) -> str:
        """What the agent of this sandbox keeps to prove, to a restarted host, which session it was given to."""
        return self._mac("ticket", sandbox_id, session)

    def relay_key(self, purpose: str, sandbox_id: str) -> str:
        """What a tool host and a cluster's node show each other that they have (32 bytes, as hex): of one sandbox, or
        of a purpose that is of none."""
        return self._mac("relay", purpose, sandbox_id)

    def check_ticket(self, ticket: str, sandbox_id: str, session: str) -> bool:
        """Whether this ticket was given by this owner, for this sandbox (as the engine names it) and session."""
        return hmac.compare_digest(ticket.encode(), self.ticket(sandbox_id, session).encode())

    def _mac(self, *parts: str) -> str:
        message = b"\0".join(part.encode() for part in (self.id, *parts))
        return hmac.new(self.secret, message, hashlib.sha256).hexdigest()
