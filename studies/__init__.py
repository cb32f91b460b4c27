"""Comparisons of whole trainings. They use the package, its demo models and its demo data; nothing imports them."""
