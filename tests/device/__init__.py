"""Every path of a GPU on the device twin: placement, results, and how often the host waits."""
