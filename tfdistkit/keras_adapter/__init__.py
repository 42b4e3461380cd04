"""Everything that stands on private names of Keras and TensorFlow, and what is built on it below the strategies."""
