"""Checks, before a step of the user's own trains, that its gradients on N replicas are those of one process."""
