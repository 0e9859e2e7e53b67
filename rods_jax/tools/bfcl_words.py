"""Words that variants of BFCL tasks draw from.

A word is swapped for another of its class everywhere in a task at once, so equality,
containment and word counts survive. No class holds a word that a tool or its documents give a
meaning to (order, book, log, copy, budget, first, business, open), nor a city or a company.
"""

from __future__ import annotations

FEMALE_NAMES = tuple("""
Amara Beatriz Carmen Dalia Elif Fatima Gita Hana Imani Jasmin Kaia Leila Mirela Nadia Odile
Paloma Rania Samira Talia Ulla Vera Wanda Xenia Yara Zora Ingrid Selma Petra Farah
""".split())

MALE_NAMES = tuple("""
Anton Bruno Cyrus Dimitri Emeka Felix Gustav Hugo Ivo Jonas Kofi Lorenzo Mateo Niko Omar Pavel
Quentin Ruben Soren Tomas Umar Viktor Yusuf Zane Rafael Tariq Milan Lukas Henrik
""".split())

FIRST_NAMES = FEMALE_NAMES + MALE_NAMES

LAST_NAMES = tuple("""
Abara Bergman Castellan Dumont Eriksen Falk Galindo Haddad Ibsen Jankovic Kessler Lindqvist
Moreau Novak Okafor Pereira Quist Rosales Sandoval Takeda Ulrich Varga Weiss Yilmaz Zielinski
Albrecht Brandt Corvino Delacroix Engel Ferreira Grunwald Hartono Kimura Larsen Mbeki Orlov
""".split())

# First names that occur in such tasks, to tell a person from another word.
KNOWN_FEMALE = frozenset("""
alice amanda anna carol catherine diana elena emily emma hannah isabella jane jennifer jessica
julia julie kate kelly laura linda lisa mary nancy nicole olivia patricia rachel rebecca
samantha sarah simona sophia susan victoria wendy zoe
""".split())

KNOWN_MALE = frozenset("""
alexander andrew bob brian charlie daniel david dave edward george henry james jason jerry joe
john jonathan kevin lucas matthew michael mike nathan oscar paul peter richard robert ryan
stephen steve thomas tim tom tony walter william
""".split())

KNOWN_NAMES = KNOWN_FEMALE | KNOWN_MALE | {"alex", "chris", "johnson", "smith", "thompson"}

# Only words that stand for each other in any sentence: "road tour", "today's blueprint" or
# "piques my diligence" would give a variant away.
WORD_CLASSES: tuple[tuple[str, ...], ...] = tuple(tuple(line.split()) for line in """
weekly monthly quarterly yearly biweekly
analysis assessment evaluation
wonderful splendid fantastic
thrilled delighted
amazing awesome
collaboration cooperation
quantum photonic
journey voyage
excursion expedition
colleague teammate coworker
workshop seminar
conference symposium convention
goals targets
objectives aims
learnings takeaways
vital crucial
friends relatives cousins
project programme
""".strip().splitlines())

FILE_TAGS = ("north", "south", "alpha", "delta", "omega", "rev2", "rev7", "east", "west", "spring",
             "autumn", "q1", "q3", "v2", "v5", "blue", "amber", "cobalt", "nova", "atlas")

STREETS = ("Alder", "Birch", "Cobble", "Dunmore", "Elmwood", "Fenwick", "Garnet", "Hawthorn",
           "Juniper", "Larkspur", "Mulberry", "Orchard", "Quarry", "Thistle", "Walnut")

# Around a user's turn; they change nothing of what is asked.
GREETINGS = ("Hello. ", "Hi there. ", "Good morning. ", "Good evening. ", "A small request. ")
# No number words here: "one" would be a source for a 1 that nobody gave.
OPENINGS = ("", "", "", "Next: ", "All right. ", "Good. ", "Now then. ", "And another thing. ",
            "Fine. ", "Very well. ", "Moving on. ")
CLOSINGS = ("", "", "", "", "", " Thanks.", " Thank you.", " Thanks in advance.", " Much obliged.")
