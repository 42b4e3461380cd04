"""Read the cluster from the variables of launchers and schedulers, one per file, with their shared code."""
