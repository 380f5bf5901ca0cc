"""What several methods evaluate alike."""
