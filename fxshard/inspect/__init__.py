"""Look at what the passes did: explain, its page, and the search for the first differing bit."""
