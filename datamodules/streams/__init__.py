"""Streams whose order does not depend on the number of processes and loader workers."""
