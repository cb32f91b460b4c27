"""Output of the callbacks: tables, TensorBoard, pictures of masks and the progress bar."""
