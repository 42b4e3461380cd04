"""The proof that Keras 3 under a strategy of tfdistkit gives what one process gives. See docs/exactness.md."""
