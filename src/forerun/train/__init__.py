"""Training of an MTP head for a model that has none: prompts, answers, features, loss, evaluation, files."""
