"""Recipes that are shipped: the catalog, whether each fits its hardware, and reference curves of those that ran."""
