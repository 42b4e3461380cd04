"""Workers as actors of a Ray cluster."""
