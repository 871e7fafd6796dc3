"""Commands that predict the gain of a pair before it is served: by simulation, closed forms and measurement."""
