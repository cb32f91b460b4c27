"""Facts about tools that prune during training, found by running them: the data of docs/comparison.md."""
