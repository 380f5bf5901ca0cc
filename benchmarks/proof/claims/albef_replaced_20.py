"""ALBEF's parts on shop photographs with 20% replaced captions: the claim of `albef_replaced.py` at another share."""

from proof.claims.albef_replaced import replaced

CLAIM = replaced(20)
