"""`vlightning search`: texts and images searched in a store of features."""
