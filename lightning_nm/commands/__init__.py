"""The commands of ``lightning-nm``, one folder each. Nothing of the library imports them."""
