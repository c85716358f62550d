"""What only those who have the run's token can write: messages between the launchers of a run carry its seal.

HMAC-SHA256 (RFC 2104) over the name of the message and its text, so that none counts in another's place. It says who
has written, and hides nothing.
"""

from __future__ import annotations

import hashlib
import hmac

LEAST_CHARACTERS = 16
"""Of a token; a made one has 256 bits in 64 characters."""
_HEX = 2 * hashlib.sha256().digest_size


class Seal:
    """Seals and opens texts with a token."""

    def __init__(self, token: str) -> None:
        """Hold the token; raises ValueError for one that can be guessed."""
        if len(token) < LEAST_CHARACTERS:
            raise ValueError(f"a token has at least {LEAST_CHARACTERS} characters, this one has {len(token)}")
        self._key = hashlib.sha256(b"dtrain " + token.encode()).digest()

    def sealed(self, name: str, text: str) -> str:
        """The text with its seal before it."""
        return self._mac(name, text.encode()) + text

    def opened(self, name: str, data: bytes) -> str | None:
        """The text, when it was sealed by this token and under this name; else None."""
        mac, text = data[:_HEX], data[_HEX:]
        if not hmac.compare_digest(mac, self._mac(name, text).encode()):
            return None
        return text.decode()

    def key(self, purpose: str) -> bytes:
        """A key for something else than messages of the launchers, from which the token cannot be found."""
        return hmac.digest(self._key, b"key\0" + purpose.encode(), hashlib.sha256)

    def _mac(self, name: str, text: bytes) -> str:
        return hmac.new(self._key, name.encode() + b"\0" + text, hashlib.sha256).hexdigest()
