"""``lightning-nm flops``: multiply-adds of a model and of its planned training, counted and never timed."""
