"""What a backup holds of the state of other callbacks."""
