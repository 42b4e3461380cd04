"""The strategy `parameter_server`: asynchronous training with variables on servers."""
