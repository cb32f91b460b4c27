"""Packed layers: modules for inference that hold N:M weights as values and positions."""
