"""The methods of the protocol, as gRPC calls them."""
