"""What moves the tensors of a strategy between processes, and how it is chosen."""
