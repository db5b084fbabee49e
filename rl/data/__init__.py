"""Where samples come from. A plugin is a class, one a file."""
