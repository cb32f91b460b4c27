"""Other training libraries: each file needs its own, and is imported by itself."""
