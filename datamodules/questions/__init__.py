"""Questions about images, and their answers."""
