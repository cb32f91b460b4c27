"""The kernel families, one file each."""
