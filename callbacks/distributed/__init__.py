"""Collectives and the sharding strategy."""
