"""What runs on a host, sent there over the connection: standard library only."""
