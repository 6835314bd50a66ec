"""Ray shells around `Node` and `Directory`: they turn calls into calls and decide nothing."""
