"""Sample streams: the port (`base`), its Redis adapter (`redis`), and an in-memory one for unit tests (`memory`)."""
