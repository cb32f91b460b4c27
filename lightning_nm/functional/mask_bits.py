"""Both masks of a weight as two bits of one byte for each entry."""

from __future__ import annotations

FORWARD_BIT = 1
"""Set where the forward mask keeps the entry."""

BACKWARD_BIT = 2
"""Set where the backward mask keeps the entry."""
