"""Scripts that train the example models; nobody has to run them to use Offramp."""
