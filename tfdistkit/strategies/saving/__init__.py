"""What the ranks of a job save."""
