"""The agent on a host, sent over the ssh connection as source: standard library only."""
