"""The learngene of a CLIP: its file, its layers, and the initialization of other networks from it.

Independent of any method: each registers its own rule (see `layers`). The package imports nothing by itself, since
`expansion` needs open_clip and timm.
"""
