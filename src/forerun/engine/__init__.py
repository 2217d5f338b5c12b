"""The loop: schedule, draft, forward, choose, commit."""
