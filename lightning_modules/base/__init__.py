"""The base class of the methods and its parts."""
