"""Commands, benchmark and demo: the edge, which nothing else imports."""
