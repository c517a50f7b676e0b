"""One token in, one token out of a full slot cache."""
