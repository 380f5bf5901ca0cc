"""The command `vlightning compare`, which runs configs over seeds and compares what they reach."""
