"""Which arm and how deep: arms, what rounds cost, how often drafts are accepted, and who decides by them."""
