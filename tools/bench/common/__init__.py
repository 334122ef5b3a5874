"""What the commands of ``eebench`` share: arguments, traces, outcomes, pages."""
