"""How ranks meet and compare: the only code that talks to the store of the default process group."""
