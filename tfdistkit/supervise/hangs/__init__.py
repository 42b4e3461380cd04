"""Tell a job that hangs from one that is slow, and say which rank is where."""
