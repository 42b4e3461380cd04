"""Kubernetes manifests."""
