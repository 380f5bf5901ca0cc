"""The command `vlightning new`, which writes the files of a method of one's own."""
