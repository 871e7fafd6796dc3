"""Commands that say what a pair would be worth, without one: by simulation, and by closed forms."""
