"""The embedded demo pair: how it is trained (`models.train`) and what came of it (`models/demo`)."""
