"""Replicas of a model on several machines behind one address: Ray Serve runs them, forerun decides who answers."""
