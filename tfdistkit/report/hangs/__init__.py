"""Where each process of a job is: progress notes that the launcher reads at any time, and stacks on request."""
