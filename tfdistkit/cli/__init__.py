"""Implements the command line, one file per command."""
