"""Authenticates both ends of a connection by the job's secret, and signs their messages.

Each end contributes a nonce, so that messages of another connection cannot be replayed. Every message carries an HMAC
(RFC 2104) with a key of this connection over its direction, its number and its text. Without a secret the key is
public: the signatures then detect damage only.
"""

from __future__ import annotations

import hmac
import secrets

from tfdistkit import env
from tfdistkit.cluster.rendezvous import protocol as wire

# Part of every signature: other values need another `protocol.PROTOCOL`.
SERVER, CLIENT = "host", "guest"
_DIGEST = "sha256"
_SIGNATURE_BYTES = 64
_NONCE_BYTES = 16


class WrongSecret(wire.NotOurs):
    """The signature of a message does not match the secret of this job."""


def job_secret() -> bytes:
    """Returns the secret of the job; empty if `TFDISTKIT_SECRET` is not set."""
    return (env.text(env.SECRET) or "").encode()


def new_nonce() -> str:
    """Returns a new random nonce as hexadecimal digits."""
    return secrets.token_hex(_NONCE_BYTES)


class Session:
    """Signs and verifies the messages of one end of a connection.

    Args:
        secret: The secret of the job.
        client_nonce: The nonce of the rank that connected.
        server_nonce: The nonce of rank 0.
        own: `SERVER` or `CLIENT`, for this end.
    """

    def __init__(self, secret: bytes, client_nonce: str, server_nonce: str, own: str):
        seed = f"{wire.MAGIC} {wire.PROTOCOL} {client_nonce} {server_nonce}".encode()
        self._key = hmac.digest(secret, seed, _DIGEST)
        self._own, self._other = own, CLIENT if own == SERVER else SERVER
        self._sent = 0
        self._received = 0

    def sign(self, message: bytes) -> bytes:
        """Returns the next message to send, with its signature."""
        self._sent += 1
        return self._signature(self._own, self._sent, message.rstrip(b"\n")) + b" " + message

    def verified(self, line: bytes) -> bytes:
        """Returns the message in the next received line.

        Raises:
            WrongSecret: if its signature is invalid.
        """
        self._received += 1
        signature, message = line[:_SIGNATURE_BYTES], line[_SIGNATURE_BYTES + 1 :]
        if not hmac.compare_digest(signature, self._signature(self._other, self._received, message)):
            raise WrongSecret(f"a message without the secret of this job ({env.SECRET})")
        return message

    def _signature(self, sender: str, number: int, message: bytes) -> bytes:
        return hmac.new(self._key, f"{sender} {number} ".encode() + message, _DIGEST).hexdigest().encode()
