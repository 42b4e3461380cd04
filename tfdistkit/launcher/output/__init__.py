"""The workers' output: complete logs, and the console."""
