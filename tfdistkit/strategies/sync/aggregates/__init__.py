"""Numbers that a step computes from its rows (sums, means, what follows from them), for the rows of all replicas."""
