"""Workers on several hosts over ssh."""
