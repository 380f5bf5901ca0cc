"""Sources of rows: files, folders, shards, streams, the hub, and generated data."""
