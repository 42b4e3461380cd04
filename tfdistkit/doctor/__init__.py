"""Checks this machine and hosts, and tries the strategies; each finding comes with a fix."""

from tfdistkit.doctor.findings import Finding, Level

__all__ = ["Finding", "Level"]
