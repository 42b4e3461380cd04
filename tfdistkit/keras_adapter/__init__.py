"""Uses of private names of Keras and TensorFlow, and the layers on them below the strategies."""
