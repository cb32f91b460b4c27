"""The bits of a layer's mask byte.

A layer keeps both of its masks in one uint8 tensor of the weight's shape. Each byte holds one bit per mask.
"""

FORWARD_BIT = 1  # set where the forward mask keeps the entry: W_F[i] = W[i]

BACKWARD_BIT = 2  # set where the backward mask keeps the entry: W_B[i] = W[i]. Only used by layers with a backward mask
