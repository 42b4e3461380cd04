"""Validate Kubernetes quantities of memory and processor time, and suggest the right unit."""

from __future__ import annotations

import re

from tfdistkit.errors import OptionError, explain

_MEMORY = re.compile(r"([0-9]+(?:\.[0-9]+)?)(k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei|e[0-9]+)?")
_CORES = re.compile(r"([0-9]+(\.[0-9]{1,3})?|[0-9]+m)")
# GB, gb, g, GiB and K: ambiguous elsewhere, and invalid in Kubernetes.
_ELSEWHERE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgtpe])(i?)b?", re.IGNORECASE)
_UNITS = "KMGTPE"
# A smaller number without a unit is a mistake: Kubernetes reads it as bytes.
_FEWEST_BYTES = 1 << 20


def check_memory(what: str, size: str) -> None:
    """Checks an amount of memory.

    Args:
        what: The name of the option.
        size: The amount, such as `16Gi`.

    Raises:
        OptionError: if Kubernetes does not accept it, or would read it as less than a MiB.
    """
    known = _MEMORY.fullmatch(size)
    if known is not None and float(known[1]) > 0 and (known[2] or float(known[1]) >= _FEWEST_BYTES):
        return
    if known is not None and float(known[1]) > 0:
        message = f"`{what}` must have a unit: Kubernetes reads a plain number as bytes."
        raise OptionError(explain(message, received=repr(size), do=f"Write {size}Gi (1024^3 bytes each)."))
    elsewhere = _ELSEWHERE.fullmatch(size.strip())
    if elsewhere is None or not float(elsewhere[1]):
        message = f"`{what}` must be a number with a unit, such as 16Gi (1024^3 bytes each) or 16G (1000^3 bytes each)."
        raise OptionError(explain(message, received=repr(size)))
    number, letter = elsewhere[1], elsewhere[2].upper()
    power = _UNITS.index(letter) + 1
    binary = f"{number}{letter}i"
    expected = f"{binary} (1024^{power} bytes each) or {number}{'k' if letter == 'K' else letter} (1000^{power})"
    raise OptionError(
        explain(
            f"`{what}` must have a unit of Kubernetes.",
            received=repr(size),
            expected=binary if elsewhere[3] else expected,
            do=f"Write {binary}.",
        )
    )


def check_cores(what: str, cores: str) -> None:
    """Checks an amount of processor time.

    Args:
        what: The name of the option.
        cores: The amount, such as `4` or `500m`.

    Raises:
        OptionError: if Kubernetes does not accept it.
    """
    if not _CORES.fullmatch(cores) or not cores.strip("0.m"):
        message = f"`{what}` must be a number of cores, such as 4 or 0.5, or of thousandths of a core, such as 500m."
        raise OptionError(explain(message, received=repr(cores)))
