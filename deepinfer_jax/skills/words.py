"""The words that skills are made of: people, cities, adjectives, things and filler sentences.

The lists are short on purpose: a vocabulary of 3,072 entries then holds nearly every word whole.
"""

NAMES: tuple[str, ...] = tuple(
    """Abel Ada Adam Agnes Alan Alba Alice Amir Amy Anna Anton Arlo Asha Axel Basil Bella Ben Bert
    Boris Bruno Carl Carla Celia Chen Clara Cleo Cora Cyrus Dana Dario David Della Diego Dina Dora
    Doris Edgar Edith Eli Ella Elmo Elsa Emil Emma Enid Eric Erin Esme Ethan Eva Ezra Felix Fiona
    Flora Frank Freya Gabe Gavin Gina Gleb Greta Gus Hana Hank Hazel Heidi Helga Henry Hilda Hugo
    Ian Ida Igor Ilse Inga Irene Iris Isaac Ivan Jack Jade James Jana Jared Jill Joan Jonas Jose
    Judy Julia Kai Karen Karl Kate Katya Keith Kevin Kim Kira Klaus Kyle Lara Lars Laura Lena Leo
    Leona Liam Lina Lisa Lola Louis Lucas Lucy Luis Luna Mara Marco Maria Mark Marta Maya Meg Mia
    Mila Milo Mina Mona Nadia Nancy Naomi Ned Nell Nick Nils Nina Noah Nora Olaf Olga Oscar Otto
    Owen Pablo Paul Pavel Penny Pete Petra Priya Quinn Ralph Raul Remy Rhea Rita Rob Rosa Ruben Ruth
    Sam Sara Sean Silas Simon Sofia Stan Stella Sven Tara Ted Tess Theo Tim Tina Toby Tom Tony Una
    Uma Vera Vince Vlad Wanda Ward Will Willa Xena Yara Yuri Zack Zara Zelda Zoe""".split()
)
"""People; keys of facts, subjects of records and calls."""

CITIES: tuple[str, ...] = tuple(
    """Accra Athens Baku Berlin Bogota Boston Bremen Cairo Cardiff Chicago Dakar Delhi Denver Dhaka
    Dublin Fargo Geneva Ghent Hanoi Havana Houston Istanbul Jakarta Kiev Kyoto Lagos Leeds Lima
    Lisbon London Lyon Madrid Malaga Malmo Manila Miami Milan Mumbai Munich Nairobi Naples Nice Oslo
    Paris Perth Porto Prague Quito Riga Rome Seoul Seville Oxford Sydney Tokyo Toronto Tunis Turin
    Utrecht Venice Verona Vienna Warsaw Zurich""".split()
)
"""Values of the city kind."""

ADJECTIVES: tuple[str, ...] = tuple(
    """amber ancient azure bitter bold brave brazen bright brisk bronze calm clever cobalt copper
    coral cosmic crimson crystal dapper daring distant eager early electric emerald fabled fancy
    fierce frozen gentle giant golden grand hidden hollow humble icy indigo ivory russet jolly keen
    lively lucky lunar marble mellow mighty misty noble ochre olive opal pearl polar proud purple
    quiet rapid royal ruby rustic scarlet secret silent silver solar steady swift teal tidy velvet
    violet vivid wild""".split()
)
"""First words of a pair."""

NOUNS: tuple[str, ...] = tuple(
    """anchor apple arrow badger barn beacon bear beaver bell bison bridge bucket camel candle
    canyon castle cedar cherry cobra comet condor cradle crane crow dagger dolphin dragon drum eagle
    ember engine falcon fern ferry flute forest fox garden gate goose grape hammer harbor hawk
    hedge heron horse island jacket jaguar kettle kite koala ladder lantern lemon lily lion lizard
    llama lotus magnet mango maple meadow melon mirror monkey moose moth needle nettle oak ocean
    orchid otter owl oyster panda parrot peach pebble pepper pigeon pillow planet plum pony quartz
    rabbit raven river robin rocket saddle salmon seal shark sparrow spider spruce squid swan table
    tiger tulip turtle valley violin walnut whale willow wolf wren zebra""".split()
)
"""Things: second words of a pair, and members of lists."""

PLACES: tuple[str, ...] = tuple(
    """archive bakery basement cellar chapel clinic depot dock factory field gallery garage hall
    hangar kitchen lab library market mill museum office park plant port roof school shop square
    stable station studio tower tunnel warehouse workshop yard""".split()
)
"""Places of filler sentences."""

TIMES: tuple[str, ...] = tuple(
    """at_noon at_night in_spring in_winter in_autumn last_year last_week on_Monday on_Friday
    before_dawn after_lunch all_day for_years every_day once_a_week since_then by_evening
    this_morning""".split()
)
"""Adverbials of filler sentences, words joined by underscores."""

VERBS: tuple[str, ...] = tuple(
    """checked cleaned closed counted covered filled fixed found guarded kept left lifted lost
    moved opened painted passed placed reached repaired showed sold stored tested visited washed
    watched""".split()
)
"""Verbs of filler sentences."""

GROUPS: tuple[str, ...] = tuple(
    """artists builders children clerks doctors drivers farmers guards guests nurses pilots
    players sailors singers students teachers tourists traders visitors workers""".split()
)
"""Subjects of filler sentences."""
