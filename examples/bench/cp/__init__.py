"""Ways to run a batch under context parallelism, as real code behind one interface, and the race between them."""
