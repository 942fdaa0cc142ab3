"""Which trials go together, and how they are laid side by side."""
