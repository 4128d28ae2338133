"""One example: where its sites, needles and decoys lie, and which keys and values they hold.

Sites, keys, values and decoys' tokens come from one stream and are the same in every arm; the places of needles and decoys come
from another, which only they use. Whether a start is free is a byte: a span that lies at q takes the starts from q − span + 1 to
q + span − 1 away from the others.
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

    def filler_start(self, example: int, tokens: int) -> int:
        """Where example `example` starts in its filler of `tokens` tokens."""
        base = base_seed(self.config.seed, self.config.length, example)
        return first_below(base + FILLER, tokens - self.config.length)

    def place(self, example: int) -> Planted:
        """Everything that example `example` plants. Raises InputError where something finds no place."""
        config, span = self.config, self.config.span
        if config.arm == "a":
            nothing = np.empty((0, span), np.uint32)
            return Planted([], [], nothing, [], nothing)
        base = base_seed(config.seed, config.length, example)
        stream = Stream(base + SITE, self._words)
        sites = self._sites(stream, example)
        keys = stream.many_below(config.alphabet, config.triples * config.key_len).reshape(config.triples, -1)
        values = stream.many_below(config.alphabet, config.triples * config.val_len).reshape(config.triples, -1)
        spans = np.concatenate([keys, values], axis=1)[self._order(stream)]
        # decoys draw tokens from one stream and places from the other, so the tokens of all can be drawn at once
        decoy_spans = stream.many_below(config.alphabet, config.decoy_count * span).reshape(-1, span)
        free = _Starts(config.length, span)
        for site in sites:
            free.take(site)
        places = Stream(base + ARM + ord(config.arm))
        if config.arm == "b":
            bounds = [site - span for site in sites]
            needles = [place if free.take(place) else None for place in bounds]
        else:
            bounds = [site - config.min_distance - span + 1 for site in sites]
            needles = free.draw(places, bounds)
        if None in needles:
            raise InputError(
                f"example {example}: no free place for the needle of the probe at {sites[needles.index(None)]}; a skipped needle "
                "would make the arms differ. Give fewer --triples, a smaller --min-distance, or another --seed."
            )
        decoys = free.draw(places, [config.length - PAD_TAIL - span + 1] * config.decoy_count)
        placed = [decoy for decoy, place in enumerate(decoys) if place is not None]
        return Planted(sites, _found(needles), spans, _found(decoys), decoy_spans[placed])

    def _sites(self, stream: Stream, example: int) -> list[int]:
        """K sites at least two spans apart, ascending: arm b plants before each, and that slot must not be another's."""
        config, low, apart = self.config, self.config.first_site, 2 * self.config.span
        n = config.last_site + 1 - low
        shift, wanted = 32 - n.bit_length(), config.triples
        free = _Starts(n, apart)
        sites: list[int] = []
        words, at, left = stream.peek(2 * wanted), 0, TRIES * wanted
        while len(sites) < wanted:
            if at == len(words):
                words = stream.peek(2 * len(words))
            value = words[at] >> shift
            at += 1
            if value >= n:
                continue
            if not left:
                raise InputError(
                    f"example {example}: {TRIES * wanted:,} draws gave {len(sites)} of {wanted} sites that are "
                    f"{apart} tokens apart. Give fewer --triples, shorter keys and values, or a larger --length."
                )
            left -= 1
            if free.take(value):
                sites.append(value + low)
        stream.skip(at)
        return sorted(sites)

    def _order(self, stream: Stream) -> npt.NDArray[np.intp]:
        """Which key and value each site gets: Fisher–Yates from the end."""
        order = list(range(self.config.triples))
        for n, j in zip(self._pairing, stream.each_below(self._pairing), strict=True):
            order[n - 1], order[j] = order[j], order[n - 1]
        return np.array(order, np.intp)


class _Starts:
    """Which starts in [0, length) are still free for a span: a byte each, with a span's width of margin at either end."""

    def __init__(self, length: int, span: int) -> None:
        self._margin, self._width = span - 1, 2 * span - 1
        self._taken = bytearray(length + self._width)
        self._near = b"\1" * self._width

    def take(self, start: int) -> bool:
        """Take `start` and all starts within a span of it; whether it was free."""
        if self._taken[start + self._margin]:
            return False
        self._taken[start : start + self._width] = self._near
        return True

    def draw(self, places: Stream, bounds: list[int]) -> list[int | None]:
        """For each of `bounds` the first free one of up to 400 draws below it, which is then taken; None where none is."""
        taken, margin, width, near = self._taken, self._margin, self._width, self._near
        words, at = places.peek(4 * len(bounds)), 0
        starts: list[int | None] = []
        for n in bounds:
            shift, left = 32 - n.bit_length(), TRIES
            start: int | None = None
            while left and start is None:
                if at == len(words):
                    words = places.peek(2 * len(words))
                value = words[at] >> shift
                at += 1
                if value < n:
                    left -= 1
                    if not taken[value + margin]:
                        taken[value : value + width] = near
                        start = value
            starts.append(start)
        places.skip(at)
        return starts


def _found(starts: list[int | None]) -> list[int]:
    return [start for start in starts if start is not None]
