"""Where samples come from. Each plugin is one class in a file of its own."""
