"""Prompts to train on: written here, cut from documentation that comes with Python, or given by the user."""
