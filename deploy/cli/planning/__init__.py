"""Commands that say what a pair would be worth, before there is one: by simulation, closed forms and measuring."""
