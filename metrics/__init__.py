"""Pure functions that callbacks and modules share; they import nothing of the package."""
