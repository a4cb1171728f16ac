"""A study as something to read: one `Report` of facts, one list of sections, three renderings."""
