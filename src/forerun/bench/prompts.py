"""Prompts of the engine's benchmark, written for it."""

PLAIN = (
    "Explain in a few sentences why the sky looks blue during the day and red in the evening.",
    "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "Give me three ideas for a cheap dinner with rice, eggs and spinach.",
)

PASSAGE = (
    "The library on Mill Street opens at nine in the morning and closes at six in the evening. On Saturdays it "
    "opens at ten and closes at two. Members may borrow up to eight books for three weeks. A book can be renewed "
    "twice unless another member has reserved it. Films and music may be borrowed for one week and cannot be "
    "renewed. The reading room on the second floor has twenty desks, four of them with a computer. Please leave "
    "bags in the lockers next to the entrance. Children under twelve must be accompanied by an adult."
)

EDIT = f"Repeat the following text word for word, but write 'ten books' instead of 'eight books':\n\n{PASSAGE}"

LONG = " ".join([PASSAGE] * 12)  # cut to 1000 tokens by the benchmark
