"""The two ports of a server: their sockets, connections and limits."""
