"""Every choice of a small problem, priced one by one: what the mixed-integer program is held against."""

import itertools

from forebay.search.problem import HOST, Choice, estimate


def every_choice(problem):
    links = problem.link is not None
    places = [[p for p in (v.places or ("",)) if links or p != HOST] for v in problem.values]
    layers = [range(g.parts + 1) if links else (0,) for g in problem.groups]
    params = [(False, True) if links and g.param_moves else (False,) for g in problem.groups]
    for chosen in itertools.product(*places):
        for counts in itertools.product(*layers):
            for hosted in itertools.product(*params):
                if all(not on_host or count == g.parts for on_host, count, g in zip(hosted, counts, problem.groups, strict=True)):
                    yield Choice(places=chosen, state_parts=counts, params_on_host=hosted)


def cheapest(problem, correction, limits):
    """(seconds, choice) of the best choice within ``limits``, or None."""
    best = None
    for choice in every_choice(problem):
        price = estimate(problem, choice, correction)
        if price.hbm_bytes > limits.hbm_bytes + 1e-3 or price.host_bytes > limits.host_bytes + 1e-3:
            continue
        if best is None or price.seconds < best[0]:
            best = (price.seconds, choice)
    return best
