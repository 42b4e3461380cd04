"""Look at what there is, try what could work, and say what mends the rest."""

from tfdistkit.doctor.findings import Finding, Level

__all__ = ["Finding", "Level"]
