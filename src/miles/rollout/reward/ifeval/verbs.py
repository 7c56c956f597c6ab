"""English verbs in all their forms: enough of them to tell whether a text begins with one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

_VERBS = """
abandon absorb accept access accompany accomplish account accuse achieve acknowledge acquire act adapt add address
adjust admire admit adopt advance advise affect afford agree aim alert align allocate allow alter amaze amuse
analyse analyze announce annoy answer anticipate apologise apologize appeal appear apply appoint appreciate approach
approve argue arrange arrest arrive ask assemble assess assign assist assume assure attach attack attempt attend
attract avoid await bake balance ban bathe become begin behave believe belong bend benefit bet blame blend bless
block blow board boil book borrow bounce bow box brainstorm break breathe bring browse brush build bump burn burst
bury buy calculate call calm campaign cancel capture care carry carve cast catch categorise categorize cause
celebrate challenge change charge chase chat check cheer chew choose chop claim clap clarify classify clean clear
click climb close coach code collaborate collect combine come comfort command comment commit communicate compare
compete compile complain complete compose compute conceal concentrate concern conclude conduct confess configure
confirm confuse connect consider consist construct consult consume contact contain continue contrast contribute
control convert convince cook cool coordinate cope copy correct cost cough count cover crack craft crash crawl
create cross crush cry cultivate cure curl customise customize cut cycle damage dance dare deal debate debug decide
declare decline decorate decrease dedicate deem defend define delay delete deliver demand demonstrate deny depart
depend deploy describe deserve design desire destroy detail detect determine develop devote die differ dig dine
discover discuss dislike display distribute dive divide document dominate donate doubt draft drag draw dream dress
drift drill drink drive drop drum dry earn ease eat edit educate elect elevate eliminate embark embrace emerge
emphasise emphasize employ empower empty enable encounter encourage end endure enforce engage enhance enjoy enlist
ensure enter entertain escape establish estimate evaluate evolve examine exceed exchange excite excuse execute
exercise exhibit exist expand expect experience experiment explain explode explore export expose express extend
extract face facilitate fade fail fall familiarise familiarize fancy fasten favor favour fear feature feed feel
fetch fight file fill film filter finance find finish fire fit fix flash flee flip float flood flow fly focus fold
follow fool forbid force forecast forget forgive form format formulate foster found frame free freeze frown fry fuel
fulfil function fund gain gather gaze generate get giggle give glance glow glue go govern grab grade grant grasp
greet grieve grill grin grind grip group grow growl guarantee guard guess guide hand handle hang happen harm harness
harvest hate haunt head heal hear heat help hesitate hide highlight hike hire hit hold honor honour hop hope host
hover hug hunt hurry hurt identify ignore illustrate imagine immerse implement imply import impress improve include
incorporate increase indicate infer influence inform inhale initiate inject injure inquire insert inspect inspire
install instruct integrate intend interpret introduce invent invest investigate invite involve iron isolate issue
jog join joke journey judge juggle jump justify keep kick kill kiss kneel knit knock know label land last laugh
launch lay lead lean leap learn leave lend let leverage lie lift light like limit link list listen live load locate
lock log look lose love lower maintain make manage manipulate manufacture map march mark marry master match matter
maximise maximize mean measure meditate meet melt memorise memorize mend mention merge mind minimise minimize mirror
miss mix moan model modify monitor motivate mount mourn move multiply murder nail name narrate navigate need
negotiate nest nod note notice notify nurture obey object observe obtain occupy occur offer omit open operate oppose
opt optimise optimize orchestrate order organise organize outline overcome overlook owe own pack paint park part
participate pass paste pause pay peel perceive perform permit persist persuade phone picture pinch place plan plant
play plead please plot plug plunge point polish ponder pop portray pose possess post pour practice practise praise
pray preach predict prefer prepare prescribe present preserve press pretend prevent print prioritise prioritize
proceed process produce program progress project promise promote prompt pronounce propose protect protest prove
provide publish pull pump punch punish purchase pursue push put qualify question queue quit quote race rain raise
rank rate reach react read realise realize reason recall receive recite reckon recognise recognize recommend
reconsider record recover recycle reduce refer reflect refresh refuse regard register regret regulate reinforce
reject rejoice relate relax release rely remain remember remind remove render renew rent repair repeat replace reply
report represent reproduce request require rescue research reserve reside resist resolve respect respond rest
restore restrict result resume retain retire retrieve return reveal reverse review revise revisit reward rewrite
ride ring rise risk roar roll rotate rub ruin rule run rush sail satisfy save savor savour say scan scare scatter
schedule scold score scrape scratch scream scrub seal search season secure see seek seem seize select sell send
sense separate serve set settle sew shake shape share shatter shave shed shift shine ship shiver shock shoot shop
shout show shrink shrug shut sigh sign signal simplify sing sink sip sit sketch ski skip slap sleep slice slide slip
slow smash smell smile smoke snatch sneak sneeze sniff snore snow soak soar solve sort sound sow spare spark speak
specify speed spell spend spill spin split spoil spoon spot spray spread spring squeeze stack staff stage stamp
stand stare start state stay steal steer step stick stir stitch stop store strap streamline strengthen stress
stretch strike strip strive stroke stroll struggle study stumble submit subscribe substitute subtract succeed suck
suffer suggest suit summarise summarize supply support suppose surf surprise surround survey survive suspect sustain
swallow swap sway swear sweat sweep swell swim swing swipe switch synthesise synthesize tackle tailor take talk tame
tap taste teach tear tease tell tempt tend terrify test thank think thrive throw tick tickle tidy tie time tip toss
touch tour trace track trade train transcribe transfer transform translate transport trap travel treat tremble trick
trim trip trot trouble trust try tuck tumble turn twist type uncover undergo underline understand undertake undress
unfasten unfold unite unlock unpack unveil update upgrade uphold upload use utilise utilize validate value vanish
vary venture verify view visit visualise visualize volunteer vote wait wake walk wander want warm warn wash waste
watch water wave wear weave weep weigh welcome whip whirl whisper whistle widen win wind wink wipe wish witness
wonder work worry wrap wreck wrestle write yawn yearn yell yield zoom
"""
_IRREGULAR = """
am are be been being is was were do does did done doing have has had having go goes went gone can could will would
shall should may might must ought arose arisen ate eaten awoke became began begun bent bet bit bitten bled blew
blown bore born bound bought broke broken brought built burst came caught chose chosen clung cost crept cut dealt
drank drunk drawn drew driven drove dug fed fell fallen felt fled flew flown flung forbade forgave forgiven forgot
forgotten fought found froze frozen gave given got gotten grew grown heard held hid hidden hit hung hurt kept knelt
knew known laid lain lay led left lent let lit lost made meant met paid put quit ran rang read ridden risen rode
rose said sang sank sat saw seen sent set shook shaken shone shot shown shrank shut slept slid slit sold sought
spent spoke spoken spread spun stood stole stolen struck stuck stung sung sunk swam swept swore sworn swung taken
taught thought threw thrown told took tore torn understood undertook undergone underwent wept woke woken won wore
worn wound wove woven written wrote gonna gotta
"""
_SHORT = re.compile(r"[^aeiou][aeiou][bdgklmnprtvz]$")


def is_verb(word: str) -> bool:
    """Is it a form of a verb that is listed here?

    >>> [is_verb(word) for word in ("Running", "tries", "don't", "quickly")]
    [True, True, True, False]
    """
    plain = word.lower().replace("’", "'")
    plain = plain.removesuffix("n't") if plain.endswith("n't") else plain.partition("'")[0]
    return plain in _forms()


@cache
def _forms() -> frozenset[str]:
    return frozenset({*_IRREGULAR.split(), "ca", "wo", *(form for verb in _VERBS.split() for form in _inflect(verb))})


def _inflect(verb: str) -> Iterator[str]:
    """A verb and its regular forms."""
    yield verb
    if verb.endswith("y") and verb[-2] not in "aeiou":
        yield from (verb[:-1] + "ies", verb[:-1] + "ied", verb + "ing")
        return
    yield verb + ("es" if verb.endswith(("s", "x", "z", "ch", "sh", "o")) else "s")
    if verb.endswith("ie"):
        yield from (verb + "d", verb[:-2] + "ying")
    elif verb.endswith("e") and not verb.endswith(("ee", "oe", "ye")):
        yield from (verb + "d", verb[:-1] + "ing")
    else:
        yield from (verb + ("d" if verb.endswith("e") else "ed"), verb + "ing")
    if _SHORT.search(verb):
        yield from (verb + verb[-1] + "ed", verb + verb[-1] + "ing")
