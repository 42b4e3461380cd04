"""Amounts of memory and processor time, as Kubernetes writes them; and what people mean who write them otherwise."""

from __future__ import annotations

import re

from tfdistkit.errors import OptionError, explain

_MEMORY = re.compile(r"([0-9]+(?:\.[0-9]+)?)(k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei|e[0-9]+)?")
_CORES = re.compile(r"([0-9]+(\.[0-9]{1,3})?|[0-9]+m)")
# GB, gb, g, GiB and K: each has two meanings elsewhere, and none in Kubernetes.
_ELSEWHERE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgtpe])(i?)b?", re.IGNORECASE)
_UNITS = "KMGTPE"
# Below this, a number without a unit was meant in another one: Kubernetes takes it for bytes.
_FEWEST_BYTES = 1 << 20


def check_memory(what: str, size: str) -> None:
    """Checks an amount of memory.

    Args:
        what: The option.
        size: The amount, such as `16Gi`.

    Raises:
        OptionError: if Kubernetes does not know its unit, or takes it for nearly nothing.
    """
    known = _MEMORY.fullmatch(size)
    if known is not None and float(known[1]) > 0 and (known[2] or float(known[1]) >= _FEWEST_BYTES):
        return
    if known is not None and float(known[1]) > 0:
        told = f"`{what}` has no unit, and Kubernetes takes it for bytes."
        raise OptionError(explain(told, received=repr(size), expected=f"a unit, such as {size}Gi (1024^3 bytes each)"))
    elsewhere = _ELSEWHERE.fullmatch(size.strip())
    if elsewhere is None or not float(elsewhere[1]):
        expected = "a number and a unit, such as 16Gi (1024^3 bytes each) or 16G (1000^3 bytes each)"
        raise OptionError(explain(f"`{what}` is no amount of memory.", received=repr(size), expected=expected))
    number, letter = elsewhere[1], elsewhere[2].upper()
    power = _UNITS.index(letter) + 1
    binary = f"{number}{letter}i"
    expected = f"{binary} (1024^{power} bytes each) or {number}{'k' if letter == 'K' else letter} (1000^{power})"
    raise OptionError(
        explain(
            f"`{what}` has a unit that Kubernetes does not know, or takes for another.",
            received=repr(size),
            expected=binary if elsewhere[3] else expected,
            do=f"Write {binary}.",
        )
    )


def check_cores(what: str, cores: str) -> None:
    """Checks an amount of processor time.

    Args:
        what: The option.
        cores: The amount, such as `4` or `500m`.

    Raises:
        OptionError: if Kubernetes would not take it.
    """
    if not _CORES.fullmatch(cores) or not cores.strip("0.m"):
        expected = "a number of cores, such as 4 or 0.5, or thousandths of one, such as 500m"
        raise OptionError(explain(f"`{what}` is no amount of cores.", received=repr(cores), expected=expected))
