"""Pieces of networks in plain torch, which gates, experts and networks share."""
