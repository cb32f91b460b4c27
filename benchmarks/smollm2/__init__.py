"""SmolLM2-135M-Instruct by the runtimes that people use, and packed: size, time to the first and each next token."""
