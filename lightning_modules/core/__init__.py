"""What networks, losses and methods are built on; imports no other folder of `lightning_modules/`."""
