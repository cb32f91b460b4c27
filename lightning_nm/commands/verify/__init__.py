"""``lightning-nm verify``."""
