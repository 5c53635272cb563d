"""Words that the made-up texts are of."""

from __future__ import annotations

import random
import re
from functools import lru_cache

from ... import haystack


def _split(text: str) -> tuple[str, ...]:
    return tuple(text.split())


ADJECTIVES = _split("""
    amber ancient bitter brave bright broken calm clever cold copper crooked curious distant early eager faded fierce
    gentle gloomy golden happy heavy hollow humble icy jolly lazy little lonely loud lucky mellow mighty narrow noble
    nervous odd pale patient plain polite proud quiet rapid rusty sandy secret sharp shy silent silver simple sleepy
    slender smooth solemn spare steady stormy stubborn sunny swift tame tender thirsty tidy timid vivid wild wise
""")

NOUNS = _split("""
    anchor apron arrow badge balcony barrel basket beacon bell blanket bottle bridge broom bucket button cabin candle
    canoe carpet castle chimney clock comet compass corner cradle curtain dagger desk drum engine falcon feather fence
    fiddle flute garden glove hammer harbor helmet hinge island jacket kettle ladder lantern lemon lizard magnet marble
    meadow mirror mitten needle oven paddle pebble pencil pepper pillow pirate pocket puzzle rabbit ribbon rocket
    saddle scarf shovel spoon statue ticket tunnel turtle umbrella valley violin wagon walnut whistle window
""")

FIRST_NAMES = _split("""
    Ada Agnes Albert Alma Ambrose Anton Arthur Beatrix Bertram Blanche Bruno Cecil Clara Conrad Cora Cyril Delia Dorian
    Edgar Edith Edmund Elias Eloise Elsa Emil Enid Ernest Esther Felix Flora Florian Gideon Greta Gustav Harriet Hector
    Hedwig Hugo Ida Ines Irma Isidor Jasper Josefa Julius Lavinia Leopold Linus Ludwig Mabel Magnus Matilda Maud Mina
    Nora Norbert Oscar Ottilie Percy Philippa Rosa Rufus Selma Silas Tabitha Theodor Ursula Viktor Vivian Winifred
""")

LAST_NAMES = _split("""
    Abernathy Ashdown Barnaby Bellweather Birchall Blackwood Brandt Calloway Carrow Castellan Corbin Crane Dashwood
    Delacourt Dunmore Eckhart Elwood Fairbairn Farrow Fenwick Galbraith Goodall Grimshaw Hallam Hartwell Hathaway
    Holloway Ingleby Ironside Jessop Kessler Kirkbride Lachlan Landry Larkin Lindqvist Lockwood Marchbanks Merriweather
    Moreau Nightingale Northcott Oakley Osterman Pemberton Penrose Quillfeather Radcliffe Ravenscroft Rosewater Sandoval
    Sedgwick Selwyn Silverstone Stanhope Tannenbaum Thackeray Tremaine Underhill Vandermeer Wainwright Whitlock Winslow
""")

_TOWN_STARTS = _split("""
    Alder Ambel Bracken Brindle Calder Cinder Dorn Elder Falken Fern Gramble Hazel Heron Iller Jarrow Kestrel Lang
    Marl Nettle Oster Pender Quarl Raven Sallow Thistle Umber Velder Wester Yarl Zeller
""")

_TOWN_ENDS = _split("""
    bach bridge brook burn by cliff combe dale fall field ford gate ham haven hill holm hurst ley mere mill moor mouth
    port stead stone thorpe ton wick wood worth
""")


def key_name(rng: random.Random) -> str:
    """A name for something to look up, such as ``rusty-lantern``."""
    return f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"


def person(rng: random.Random) -> str:
    return f"{rng.choice(FIRST_NAMES)} {rng.choice(LAST_NAMES)}"


def town(rng: random.Random) -> str:
    return rng.choice(_TOWN_STARTS) + rng.choice(_TOWN_ENDS)


@lru_cache(maxsize=1)
def vocabulary() -> tuple[str, ...]:
    """Words of 4 to 10 letters from the text that ships with Python, those that stand there more than once."""
    found = re.findall(r"\b[a-z]{4,10}\b", " ".join(haystack.topics()))
    seen: set[str] = set()
    twice: set[str] = set()
    for word in found:
        (twice if word in seen else seen).add(word)
    return tuple(sorted(twice))
