"""Export by ExecuTorch: int8 programs for Arm's Ethos-U85, which runs 2:4 weights faster, and for CPUs."""
