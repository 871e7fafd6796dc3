"""Reference implementation of sampling: from logits to p, and from p to a token, one row at a time, in numpy."""

from core.exact.sampling import Q_MASS, TOP_P_SLACK
