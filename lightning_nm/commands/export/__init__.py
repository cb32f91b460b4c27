"""``lightning-nm export``."""
