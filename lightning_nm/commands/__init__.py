"""The commands of ``lightning-nm``, one file each but for the study. Nothing of the library imports them."""
