"""The op seam, the layer adapters, and their installation in a model."""
