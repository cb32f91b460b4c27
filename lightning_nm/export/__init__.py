"""Reading and checking what a training run leaves behind."""
