"""One function per operation, each with bodies that keep a row's bits independent of its neighbours."""
