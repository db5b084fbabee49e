"""Side by side with what a user would run instead, and where an iteration's time goes."""
