"""The web process: the page that drives one world through several caches."""
