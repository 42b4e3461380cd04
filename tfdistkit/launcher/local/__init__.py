"""Workers on this machine."""
