"""Pure functions that callbacks, modules and commands share; this folder imports nothing of the package."""
