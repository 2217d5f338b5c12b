"""What a sequence remembers: key/value pages, and later recurrent states; each with `commit(n)`."""
