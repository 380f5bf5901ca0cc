"""What every datamodule is made of."""
