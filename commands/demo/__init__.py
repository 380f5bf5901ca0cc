"""`vlightning demo`: a local page that searches a folder of images, shows where a model looks, and describes images."""
