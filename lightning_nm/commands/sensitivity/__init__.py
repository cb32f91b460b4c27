"""``lightning-nm sensitivity``: what each pattern would do to each layer of a trained model."""
