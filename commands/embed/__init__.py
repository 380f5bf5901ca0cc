"""`vlightning embed`: features of the images and texts of a data set, computed once."""
