"""Our own small world model: walks through generated rooms on any machine, offline."""
