"""The Python packages to build and run Horovod: pinned releases, with the checksums of their files.

Installed packages are used as they are. Missing ones come from the user's package index, which need not be trusted: pip
installs a file only if its checksum is one of these. The files are wheels for Linux on x86_64 and aarch64, for all
supported Pythons; none of these packages requires another.

To take a newer release, change its version, and take the SHA-256 checksums of its wheels (`pip download`, `pip hash`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Pin:
    """A release of a package.

    Args:
        version: The version of the release.
        sha256: The SHA-256 checksums of its files.
    """

    version: str
    sha256: tuple[str, ...]


PINS = {
    "setuptools": Pin(
        "80.9.0",
        (
            "062d34222ad13e0cc312a4c02d73f059e86a4acbfbdea8f8f76b28c99f306922",  # any
        ),
    ),
    "wheel": Pin(
        "0.45.1",
        (
            "708e7481cc80179af0e556bbf0cc00b8444c7321e2700b8d8580231d13017248",  # any
        ),
    ),
    "packaging": Pin(
        "25.0",
        (
            "29572ef2b1f17581046b3a2227d5c611fb25ec70ca1ba8554b24b0e69331a484",  # any
        ),
    ),
    "cloudpickle": Pin(
        "3.1.2",
        (
            "9acb47f6afd73f60dc1df93bb801b472f05ff42fa6c84167d25cb206be1fbf4a",  # any
        ),
    ),
    "psutil": Pin(
        "7.2.2",
        (
            "b0726cecd84f9474419d67252add4ac0cd9811b04d61123054b9fb6f57df6e9e",  # cp36 aarch64
            "076a2d2f923fd4821644f5ba89f059523da90dc9014e85f8e45a5774ca5bc6f9",  # cp36 x86_64
        ),
    ),
    "PyYAML": Pin(
        "6.0.3",
        (
            "b30236e45cf30d2b8e7b3e85881719e98507abed1011bf463a8fa23e9c3e98a8",  # cp310 aarch64
            "9c7708761fccb9397fe64bbc0395abcae8c4bf7b0eac081e12b809bf47700d0b",  # cp310 x86_64
            "10892704fc220243f5305762e276552a0395f7beb4dbf9b14ec8fd43b57f126c",  # cp311 aarch64
            "b8bb0864c5a28024fac8a632c443c87c5aa6f215c0b126c449ae1a150412f31d",  # cp311 x86_64
            "9149cad251584d5fb4981be1ecde53a1ca46c891a79788c0df828d2f166bda28",  # cp312 aarch64
            "ba1cc08a7ccde2d2ec775841541641e4548226580ab850948cbfda66a1befcdc",  # cp312 x86_64
            "ee2922902c45ae8ccada2c5b501ab86c36525b883eff4255313a253a3160861c",  # cp313 aarch64
            "0f29edc409a6392443abf94b9cf89ce99889a1dd5376d94316ae5145dfedd5d6",  # cp313 x86_64
        ),
    ),
}


def requirements(names: Sequence[str]) -> str:
    """Returns a requirements file with the pinned versions and checksums of packages.

    Args:
        names: Names of packages in `PINS`.
    """
    lines = (" ".join([spelled(name), *(f"--hash=sha256:{one}" for one in PINS[name].sha256)]) for name in names)
    return "".join(f"{line}\n" for line in lines)


def spelled(name: str) -> str:
    """Returns a package with its version, such as `wheel==0.45.1`.

    Args:
        name: The name of a package in `PINS`.
    """
    return f"{name}=={PINS[name].version}"
