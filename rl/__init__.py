"""RL for vision-language models that write the edit while a frozen generator draws it."""
