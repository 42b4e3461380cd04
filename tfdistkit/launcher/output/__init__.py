"""What workers print: kept whole, and shown."""
