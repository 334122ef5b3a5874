"""Scripts that train the example models; they are not needed to use Offramp."""
