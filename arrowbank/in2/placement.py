"""One example: where its sites, needles and decoys lie, and which keys and values they hold.

Sites, keys, values and decoys' tokens come from one stream and are the same in every arm; the places of needles and decoys come
from another, which only they use. Whether a start is free is a byte: a span that lies at q takes the starts from q − span + 1 to
q + span − 1 away from the others.
"""

from __future__ import annotations

from operator import length_hint
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from arrowbank.errors import InputError
from arrowbank.in2.config import PAD_TAIL, In2Config
from arrowbank.in2.draws import FIRST_WORDS, Stream, Words, base_seed, first_below

TRIES = 400
SITE, ARM, FILLER = 7, 1000, 99
NONE = -1  # where something has no place


class Planted(NamedTuple):
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
        ratio = (1 << config.alphabet.bit_length()) / config.alphabet
        drawn = (config.triples + config.decoy_count) * config.span
        self._words = int(1.05 * ratio * drawn) + 4 * config.triples + FIRST_WORDS // 2
        self._pairing = [(n - 1, 32 - n.bit_length(), n) for n in range(config.triples, 1, -1)]
        self._decoy_bounds = [config.length - PAD_TAIL - config.span + 1] * config.decoy_count

    def filler_start(self, example: int, tokens: int) -> int:
        """Where example `example` starts in its filler of `tokens` tokens."""
        base = base_seed(self.config.seed, self.config.length, example)
        return first_below(base + FILLER, tokens - self.config.length)

    def place(self, example: int) -> Planted:
        """Everything that example `example` plants. Raises InputError where something finds no place."""
        config, span, triples = self.config, self.config.span, self.config.triples
        if config.arm == "a":
            nothing = np.empty((0, span), np.uint32)
            return Planted([], [], nothing, [], nothing)
        base = base_seed(config.seed, config.length, example)
        stream = Stream(base + SITE, self._words)
        sites = self._sites(stream, example)
        drawn = stream.many_below(config.alphabet, triples * span)  # all keys, then all values
        keys, values = drawn[: triples * config.key_len], drawn[triples * config.key_len :]
        spans = np.concatenate([keys.reshape(triples, -1), values.reshape(triples, -1)], axis=1)[self._order(stream)]
        # decoys draw tokens from one stream and places from the other, so the tokens of all can be drawn at once
        decoy_spans = stream.many_below(config.alphabet, config.decoy_count * span).reshape(-1, span)
        free = _Starts(config.length, span, sites)
        places = Stream(base + ARM + ord(config.arm))
        if config.arm == "b":
            needles = free.take([site - span for site in sites])
        else:
            nearest = config.min_distance + span - 1
            needles = free.draw(places, [site - nearest for site in sites])
        if NONE in needles:
            raise InputError(
                f"example {example}: no free place for the needle of the probe at {sites[needles.index(NONE)]}; a skipped needle "
                "would make the arms differ. Give fewer --triples, a smaller --min-distance, or another --seed."
            )
        decoys = free.draw(places, self._decoy_bounds)
        if NONE in decoys:
            decoy_spans = decoy_spans[[decoy for decoy, place in enumerate(decoys) if place != NONE]]
            decoys = [place for place in decoys if place != NONE]
        return Planted(sites, needles, spans, decoys, decoy_spans)

    def _sites(self, stream: Stream, example: int) -> list[int]:
        """K sites at least two spans apart, ascending: arm b plants before each, and that slot must not be another's."""
        config, low, apart = self.config, self.config.first_site, 2 * self.config.span
        n, wanted, tried = config.last_site + 1 - low, config.triples, 0
        shift, limit = 32 - n.bit_length(), TRIES * wanted
        margin, width = apart - 1, 2 * apart - 1
        near, ones = bytearray(n + width), b"\1" * width
        sites: list[int] = []
        while tried < limit:
            values = stream.peek(2 * wanted, shift)
            left = iter(values)
            for value in left:
                if value < n and not near[value + margin]:
                    near[value : value + width] = ones
                    sites.append(value + low)
                    if len(sites) == wanted:
                        break
            used = len(values) - length_hint(left)
            stream.skip(used)
            if len(sites) == wanted and not tried:  # of so few draws none is one too many
                return sorted(sites)
            tried += sum(value < n for value in values[:used])
            if len(sites) == wanted and tried <= limit:
                return sorted(sites)
        raise InputError(
            f"example {example}: {limit:,} draws gave fewer than {wanted} sites that are {apart} tokens apart. Give fewer "
            "--triples, shorter keys and values, or a larger --length."
        )

    def _order(self, stream: Stream) -> npt.NDArray[np.intp]:
        """Which key and value each site gets: Fisher–Yates from the end."""
        count = 2 * self.config.triples
        while True:
            words, order = stream.peek(count), list(range(self.config.triples))
            left = iter(words)
            for last, shift, n in self._pairing:
                for word in left:
                    j = word >> shift
                    if j < n:
                        break
                else:
                    break
                order[last], order[j] = order[j], order[last]
            else:
                stream.skip(len(words) - length_hint(left))
                return np.array(order, np.intp)
            count *= 2  # there were too few words: begin again


class _Starts:
    """Which starts in [0, length) are still free for a span: a byte each, with a span's width of margin at either end."""

    def __init__(self, length: int, span: int, sites: list[int]) -> None:
        self._margin, self._width = span - 1, 2 * span - 1
        self._near = b"\1" * self._width
        self._taken = bytearray(length + self._width)
        taken, width, near = self._taken, self._width, self._near
        for site in sites:
            taken[site : site + width] = near

    def take(self, starts: list[int]) -> list[int]:
        """Take each of `starts`; NONE for one that is not free."""
        return [start if self._free(start) else NONE for start in starts]

    def _free(self, start: int) -> bool:
        if self._taken[start + self._margin]:
            return False
        self._taken[start : start + self._width] = self._near
        return True

    def draw(self, places: Stream, bounds: list[int]) -> list[int]:
        """For each of `bounds` the first free one of up to 400 draws below it, which is then taken; NONE where none is."""
        taken, margin, width, near = self._taken, self._margin, self._width, self._near
        starts: list[int] = []
        while len(starts) < len(bounds):
            # of so few words no bound can use up its tries; one that comes to their end begins again, counted
            words = enumerate(places.peek(min(TRIES, 3 * (len(bounds) - len(starts)))), 1)
            begin = 0
            rest = bounds[len(starts) :]
            for n, bits in zip(rest, map(int.bit_length, rest), strict=True):
                shift = 32 - bits
                for at, word in words:
                    value = word >> shift
                    if value < n and not taken[value + margin]:
                        taken[value : value + width] = near
                        starts.append(value)
                        begin = at
                        break
                else:
                    break
            places.skip(begin)
            if len(starts) < len(bounds):
                starts.append(self._draw_one(places, bounds[len(starts)]))
        return starts

    def _draw_one(self, places: Stream, n: int) -> int:
        for _ in range(TRIES):
            if self._free(start := places.below(n)):
                return start
        return NONE
