"""One file per group of endpoints; `serve/app.py` puts them together."""
