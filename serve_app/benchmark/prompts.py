"""Prompts of a wanted number of tokens, made of common words, for a server whose tokenizer is unknown."""

from __future__ import annotations

import random
from dataclasses import dataclass

_COMMON = """
about above across after again against almost along already always among animal another answer around asked away back
became because become before began begin behind being below between body book both bring brought building business
called came cannot car carry center certain change children city clear close cold common complete country course cut
dark day deep development did different does done door down draw during each early earth east easy either end enough
even every example eyes face fact fall family far father feel feet felt few field figure final find fire first five
follow food form four free from full gave general girl give given gone good government great green ground group grow
half hand hard head hear heard heart held help here high himself history hold home hope hour house however human
hundred idea important inside interest into itself job just keep kept kind knew know known land language large last
late later law lay lead learn least leave left less letter life light line list little live local long look lost low
made main make man many matter mean men might mind minute moment money month moon more morning most mother mountain
move much music must name national nature near need never new next night nothing number object off often old once one
only open order other over own page paper part party past pattern people perhaps person picture place plan plant play
point position possible power present problem produce product public question quite rain reach read ready real reason
red remember rest result right river road rock room round rule run same school science sea second section seem seen
sentence set several shape ship short should show side simple since size small social something sometimes song soon
sound south space special stand star start state step still stood stop story street strong study such sun sure system
table take talk tell ten test thing think third those thought thousand three through time today together told top
toward town travel tree true turn two under unit until upon use usually value very voice walk wall want war warm watch
water way weather week weight well west while white whole why wind winter within without woman word work world would
write year yet young
"""
_WORDS = _COMMON.split()


@dataclass(frozen=True, slots=True)
class TokenScale:
    """Number of tokens of a prompt as the server counts them: `fixed`, and `per_word` for each word."""

    fixed: float = 0.0
    """Tokens around the words, such as those of a chat template."""
    per_word: float = 1.0

    @classmethod
    def through(cls, few: tuple[int, int], many: tuple[int, int]) -> TokenScale:
        """Return the scale through two measurements, each a number of words and of tokens."""
        per_word = (many[1] - few[1]) / (many[0] - few[0])
        return cls(max(0.0, few[1] - per_word * few[0]), per_word) if per_word > 0 else cls()

    def num_words(self, num_tokens: int) -> int:
        """Return the number of words whose prompt has about `num_tokens` tokens; at least one."""
        return max(1, round((num_tokens - self.fixed) / self.per_word))


def words(num_words: int, rng: random.Random) -> list[str]:
    """Draw words."""
    return rng.choices(_WORDS, k=num_words)
