"""Words that variants of BFCL tasks draw from.

A word is swapped for another of its class everywhere in a task at once, so equality,
containment and word counts survive. No class holds a word that a tool or its documents give a
meaning to (order, book, log, copy, budget, first, business, open), nor a city or a company.
"""

from __future__ import annotations

FIRST_NAMES = tuple("""
Amara Anton Beatriz Bruno Carmen Cyrus Dalia Dimitri Elif Emeka Fatima Felix Gita Gustav Hana
Hugo Imani Ivo Jasmin Jonas Kaia Kofi Leila Lorenzo Mirela Mateo Nadia Niko Odile Omar Paloma
Pavel Quentin Rania Ruben Samira Soren Talia Tomas Ulla Umar Vera Viktor Wanda Xenia Yusuf
Yara Zane Zora Ingrid Rafael Selma Tariq Noor Milan Petra Lukas Farah
""".split())

LAST_NAMES = tuple("""
Abara Bergman Castellan Dumont Eriksen Falk Galindo Haddad Ibsen Jankovic Kessler Lindqvist
Moreau Novak Okafor Pereira Quist Rosales Sandoval Takeda Ulrich Varga Weiss Yilmaz Zielinski
Albrecht Brandt Corvino Delacroix Engel Ferreira Grunwald Hartono Kimura Larsen Mbeki Orlov
""".split())

# First names that occur in such tasks, to tell a person from another word.
KNOWN_NAMES = frozenset("""
alex alice alexander amanda andrew anna bob brian carol catherine charlie chris daniel david
dave diana edward elena emily emma george hannah henry isabella james jane
jason jennifer jessica jerry joe john johnson jonathan julia julie kate kelly kevin laura linda
lisa lucas mary matthew michael mike nancy nathan nicole olivia oscar patricia paul peter
rachel rebecca richard robert ryan samantha sarah simona smith sophia stephen steve susan thomas
thompson tim tom tony victoria walter wendy william zoe
""".split())

WORD_CLASSES: tuple[tuple[str, ...], ...] = tuple(tuple(line.split()) for line in """
weekly monthly quarterly yearly biweekly
analysis assessment appraisal evaluation overview
exciting thrilling wonderful delightful splendid fantastic
excited thrilled delighted overjoyed eager
amazing awesome stunning superb marvelous
breakthrough milestone discovery turnaround
innovation creativity teamwork diligence curiosity
collaboration cooperation partnership mentoring
growth momentum progress resilience
quantum photonic neural genomic robotic
journey voyage excursion expedition getaway
trip outing tour holiday
adventure escapade quest
colleague teammate coworker partner
meeting workshop briefing seminar
conference symposium summit convention
deadline cutoff checkpoint
team crew squad
goals targets objectives aims
strategy roadmap blueprint
insights observations learnings takeaways
important essential vital crucial
urgent pressing critical
friends relatives cousins neighbors
family household clan
vacation retreat
updates bulletins
research fieldwork
project initiative programme
""".strip().splitlines())

FILE_TAGS = ("north", "south", "alpha", "delta", "omega", "rev2", "rev7", "east", "west", "spring",
             "autumn", "q1", "q3", "v2", "v5", "blue", "amber", "cobalt", "nova", "atlas")

STREETS = ("Alder", "Birch", "Cobble", "Dunmore", "Elmwood", "Fenwick", "Garnet", "Hawthorn",
           "Juniper", "Larkspur", "Mulberry", "Orchard", "Quarry", "Thistle", "Walnut")
