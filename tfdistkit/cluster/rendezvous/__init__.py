"""All training processes find each other before any of them starts TensorFlow's server."""
