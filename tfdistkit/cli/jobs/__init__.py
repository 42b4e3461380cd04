"""The commands for jobs that run: `tfdistkit ps`, `logs`, `stop` and `stacks`."""
