"""Steps in which a replica trains on its own rows alone, between two averages of an algorithm such as `LocalSGD`."""
