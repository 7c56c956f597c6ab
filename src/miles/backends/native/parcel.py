"""What the ranks of an engine say to each other, as bytes (see core.wire): a verb, and an order or a few numbers."""

from __future__ import annotations

from miles.backends.native.order import Edits, Looks, Manner, Order, Scoring
from miles.core.wire import Codec

CODEC = Codec((Order, Manner, Edits, Looks, Scoring))
