"""One example: where its sites, needles and decoys lie, and which keys and values they hold.

Sites, keys, values and decoys' tokens come from one stream and are the same in every arm; the places of needles and decoys come
from another, which only they use. Whether a place is free is a byte a start: a span is [start, start + span), so a span that lies at
q takes every start from q − span + 1 to q + span − 1 away from the others.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from arrowbank.errors import InputError
from arrowbank.in2.config import PAD_TAIL, In2Config
from arrowbank.in2.draws import FIRST_WORDS, Stream, Words, base_seed, first_below

TRIES = 400
SITE, ARM, FILLER = 7, 1000, 99


@dataclass(frozen=True)
class Planted:
    """What one example holds beside filler. Everything is empty in arm a.

    sites, needles   K starts each, the s-th needle belonging to the s-th site, sites ascending
    spans            [K, key_len + val_len], key then value, in the sites' order
    decoys           the starts of the decoys that found a place
    decoy_spans      [decoys, key_len + val_len]
    """

    sites: list[int]
    needles: list[int]
    spans: Words
    decoys: list[int]
    decoy_spans: Words


class Placement:
    """Places examples under one set of options. Made once, used for many examples."""

    def __init__(self, config: In2Config) -> None:
        self.config = config
        self._pairing = range(config.triples, 1, -1)
        ratio = (1 << config.alphabet.bit_length()) / config.alphabet
        drawn = (config.triples + config.decoy_count) * config.span
        self._words = int(1.1 * ratio * drawn) + 4 * config.triples + FIRST_WORDS
        self._taken = bytes([1]) * (4 * config.span)

    def filler_start(self, example: int, tokens: int) -> int:
        """Where example `example` starts in its filler of `tokens` tokens."""
        base = base_seed(self.config.seed, self.config.length, example)
        return first_below(base + FILLER, tokens - self.config.length)

    def place(self, example: int) -> Planted:
        """Everything that example `example` plants. Raises InputError where something finds no place."""
        config = self.config
        if config.arm == "a":
            nothing = np.empty((0, config.span), np.uint32)
            return Planted([], [], nothing, [], nothing)
        base = base_seed(config.seed, config.length, example)
        stream = Stream(base + SITE, self._words)
        sites = self._sites(stream, example)
        keys = stream.many_below(config.alphabet, config.triples * config.key_len).reshape(config.triples, -1)
        values = stream.many_below(config.alphabet, config.triples * config.val_len).reshape(config.triples, -1)
        spans = np.concatenate([keys, values], axis=1)[self._order(stream)]
        blocked = bytearray(config.length + 4 * config.span)
        for site in sites:
            self._block(blocked, site)
        places = Stream(base + ARM + ord(config.arm))
        needles = self._needles(places, sites, blocked, example)
        # decoys draw tokens from one stream and places from the other, so the tokens of all can be drawn at once
        decoy_spans = stream.many_below(config.alphabet, config.decoy_count * config.span).reshape(-1, config.span)
        decoys, placed = self._decoys(places, blocked)
        return Planted(sites, needles, spans, decoys, decoy_spans[placed])

    def _sites(self, stream: Stream, example: int) -> list[int]:
        """K sites at least two spans apart, ascending: arm b plants before each, and that slot must not be another's."""
        config, low, apart = self.config, self.config.first_site, 2 * self.config.span
        n = config.last_site + 1 - low
        shift = 32 - n.bit_length()
        near = bytearray(config.length + apart)
        taken = self._taken[: 2 * apart - 1]
        sites: list[int] = []
        words, at, left = stream.peek(2 * config.triples), 0, TRIES * config.triples
        while len(sites) < config.triples:
            if at == len(words):
                words = stream.peek(2 * len(words))
            value = words[at] >> shift
            at += 1
            if value >= n:
                continue
            if not left:
                raise InputError(
                    f"example {example}: {TRIES * config.triples:,} draws gave {len(sites)} of {config.triples} sites that are "
                    f"{apart} tokens apart. Give fewer --triples, shorter keys and values, or a larger --length."
                )
            left -= 1
            place = value + low
            if not near[place]:
                start = place - apart + 1
                near[max(0, start) : place + apart] = taken[max(0, -start) :]
                sites.append(place)
        stream.skip(at)
        return sorted(sites)

    def _order(self, stream: Stream) -> npt.NDArray[np.intp]:
        """Which key and value each site gets: Fisher–Yates from the end."""
        order = list(range(self.config.triples))
        for n, j in zip(self._pairing, stream.each_below(self._pairing), strict=True):
            order[n - 1], order[j] = order[j], order[n - 1]
        return np.array(order, np.intp)

    def _block(self, blocked: bytearray, place: int) -> None:
        start = place - self.config.span + 1
        blocked[max(0, start) : place + self.config.span] = self._taken[max(0, -start) : 2 * self.config.span - 1]

    def _needles(self, places: Stream, sites: list[int], blocked: bytearray, example: int) -> list[int]:
        config = self.config
        needles: list[int] = []
        for site in sites:
            if config.arm == "b":
                place = None if blocked[site - config.span] else site - config.span
            else:
                place = _free_place(places, site - config.min_distance - config.span + 1, blocked)
            if place is None:
                raise InputError(
                    f"example {example}: no free place for the needle of the probe at {site}; a skipped needle would make the "
                    "arms differ. Give fewer --triples, a smaller --min-distance, or another --seed."
                )
            self._block(blocked, place)
            needles.append(place)
        return needles

    def _decoys(self, places: Stream, blocked: bytearray) -> tuple[list[int], list[int]]:
        """The starts of the decoys that found a place, and which they are."""
        starts: list[int] = []
        placed: list[int] = []
        for decoy in range(self.config.decoy_count):
            place = _free_place(places, self.config.length - PAD_TAIL - self.config.span + 1, blocked)
            if place is not None:
                self._block(blocked, place)
                starts.append(place)
                placed.append(decoy)
        return starts, placed


def _free_place(places: Stream, n: int, blocked: bytearray) -> int | None:
    """The first free one of up to 400 draws below n."""
    shift, at, tries = 32 - n.bit_length(), 0, 0
    words = places.peek(8)
    while tries < TRIES:
        if at == len(words):
            words = places.peek(2 * len(words))
        value = words[at] >> shift
        at += 1
        if value < n:
            tries += 1
            if not blocked[value]:
                places.skip(at)
                return value
    places.skip(at)
    return None
