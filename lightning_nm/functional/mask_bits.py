"""The bits of a layer's mask bytes: both of its masks are in one uint8 tensor of the weight's shape."""

# Set where the forward mask keeps the entry: W_F[i] = W[i].
FORWARD_BIT = 1

# Set where the backward mask keeps the entry: W_B[i] = W[i]. Only used by layers with a backward mask.
BACKWARD_BIT = 2
