"""What tests share: models, fakes, runs in processes."""
