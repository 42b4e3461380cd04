"""The strategy `horovod`."""
