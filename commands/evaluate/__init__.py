"""`vlightning evaluate`: any image-text model on DataComp's 38 sets, or on a folder of one's own images."""
