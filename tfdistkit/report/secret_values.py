"""Detects secret values, by the names of variables and options or by their form, so that they are not shown."""

from __future__ import annotations

import re
from collections.abc import Sequence

HIDDEN = "(hidden)"

_VARIABLE = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH", re.IGNORECASE)
# Narrower than for variables: scripts have options such as `--tokenizer`, `--sort-key`, `--author`.
_OPTION = re.compile(
    r"--?([a-z0-9_-]*[-_])?"
    r"((api|access|secret|private)[-_]?key|token|secret|passw(or)?d|passphrase|credentials?)",
    re.IGNORECASE,
)
# A URL with a password: `postgres://me:password@host/`.
_PASSWORD_IN_URL = re.compile(r"://[^/\s:@]*:[^/\s@]*@")


def is_secret(name: str, value: str) -> bool:
    """Returns whether a variable is secret: by its name, or as a URL with a password.

    Args:
        name: The name of the variable.
        value: The value.
    """
    return bool(_VARIABLE.search(name) or _PASSWORD_IN_URL.search(value))


def without_secrets_in(words: Sequence[str]) -> list[str]:
    """Returns a command without passwords in URLs and values of `--api-key` and similar options.

    Args:
        words: The command and its arguments.
    """
    shown: list[str] = []
    is_value = False
    for word in words:
        option, equals, _ = word.partition("=")
        is_option = _OPTION.fullmatch(option) is not None
        if is_value and not word.startswith("-"):
            shown.append(HIDDEN)
        elif is_option and equals:
            shown.append(f"{option}={HIDDEN}")
        else:
            shown.append(HIDDEN if _PASSWORD_IN_URL.search(word) else word)
        is_value = is_option and not equals
    return shown
