"""Runs a rendezvous of all training processes before any of them starts TensorFlow's server."""
