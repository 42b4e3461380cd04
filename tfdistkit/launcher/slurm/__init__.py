"""SLURM jobs."""
