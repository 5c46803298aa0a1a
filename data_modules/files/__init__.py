"""Fetch, unpack, parse and cache the published files of the data sets; no LightningDataModule in here."""
