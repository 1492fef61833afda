"""Broken graphs, by the hundred: the verifier must catch each of them."""
