"""The embedded demo pair: its training program (`models.train`) and the resulting models (`models/demo`)."""
