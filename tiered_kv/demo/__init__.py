"""A small real model and real texts, to see the service at work on a laptop without a GPU."""
