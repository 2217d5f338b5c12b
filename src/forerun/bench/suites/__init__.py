"""One module per suite: `add_options` says what may be chosen, `measure` prints as it goes and returns all figures."""
