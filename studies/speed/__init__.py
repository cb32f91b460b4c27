"""Trains a small GPT sparse and dense side by side, and compares speed and loss: ``python -m studies.speed``."""
