"""Base datamodule, loaders, sampling and samples."""
