"""What advances while a model trains: steps, phases, statistics."""
