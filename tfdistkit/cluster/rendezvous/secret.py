"""Proves to both ends of a connection that the other end knows the job's secret, and signs what they say.

Each end contributes a random number, so that nothing that was overheard in another connection can be said again. Every
message then carries an HMAC (RFC 2104) with a key of this connection, over its direction, its number and its text.
Without a secret the key is known to everybody: the signatures then only find damage.
"""

from __future__ import annotations

import hmac
import secrets

from tfdistkit import env
from tfdistkit.cluster.rendezvous import protocol as wire

HOST, GUEST = "host", "guest"
_DIGEST = "sha256"
_SIGNATURE_BYTES = 64
_NONCE_BYTES = 16


class WrongSecret(wire.NotOurs):
    """A message that somebody sent who does not know the secret of this job."""


def job_secret() -> bytes:
    """Returns the secret of this process's job; empty where no launcher and no user set one."""
    return (env.text(env.SECRET) or "").encode()


def new_nonce() -> str:
    """Returns a random number that was never used before, as hexadecimal digits."""
    return secrets.token_hex(_NONCE_BYTES)


class Session:
    """One end's view of a connection whose messages are signed.

    Args:
        secret: The secret of the job.
        guest_nonce: The random number of the rank that came.
        host_nonce: The random number of rank 0.
        own: `HOST` or `GUEST`: which end this is.
    """

    def __init__(self, secret: bytes, guest_nonce: str, host_nonce: str, own: str):
        seed = f"{wire.MAGIC} {wire.PROTOCOL} {guest_nonce} {host_nonce}".encode()
        self._key = hmac.digest(secret, seed, _DIGEST)
        self._own, self._other = own, GUEST if own == HOST else HOST
        self._sent = 0
        self._received = 0

    def sign(self, message: bytes) -> bytes:
        """Returns a message, to be sent next, with its signature."""
        self._sent += 1
        return self._signature(self._own, self._sent, message.rstrip(b"\n")) + b" " + message

    def verified(self, line: bytes) -> bytes:
        """Returns the message in the line that came next.

        Raises:
            WrongSecret: if its signature is not that of the other end.
        """
        self._received += 1
        signature, message = line[:_SIGNATURE_BYTES], line[_SIGNATURE_BYTES + 1 :]
        if not hmac.compare_digest(signature, self._signature(self._other, self._received, message)):
            raise WrongSecret(f"a message without the secret of this job ({env.SECRET})")
        return message

    def _signature(self, sender: str, number: int, message: bytes) -> bytes:
        return hmac.new(self._key, f"{sender} {number} ".encode() + message, _DIGEST).hexdigest().encode()
