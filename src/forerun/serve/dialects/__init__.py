"""How other APIs than OpenAI's chat say the same things: requests into chat jobs, chat events into their own JSON."""
